"""One attempt at an artifact: its layout, its shards, its files, its commit."""

import secrets
from collections.abc import Callable, Iterable
from typing import Any

from cosmos_rl_core.canonical import canonical_json, differences, sha256
from cosmos_rl_core.errors import ArtifactError, CosmosRLError, RepeatError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import RESTORE
from cosmos_rl_core.storage.store import Chunk
from stages.artifacts import files
from stages.artifacts.files import read_entry, read_stored
from stages.artifacts.generations import invalidate
from stages.artifacts.layouts import Check, difference
from stages.artifacts.manifest import Manifest, content_of
from stages.artifacts.records import FileEntry, Layout, Marker, place_of, shards_of
from stages.artifacts.request import Request
from stages.artifacts.slots import current_of, read_manifest, why_stale
from stages.contracts import RECORDS

Log = Callable[[str], None]
MAKE_AGAIN = "remove it to have this shard made again"


class Attempt:
    """One try at making the artifact of a Request. Every rank has one, all with the same id; only rank 0 commits.

    :meth:`begin` gives the generation and the id.
    """

    def __init__(self, request: Request, numerics: dict[str, Any], generation: int, attempt: str) -> None:
        self.request, self.numerics = request, numerics
        self.generation, self.id = generation, attempt
        recipe, inputs = request.recipe, request.input_contents
        self._made_from = {"recipe": recipe, "inputs": inputs, "numerics": numerics}
        self.files: dict[str, FileEntry] = {}
        self.adopted = 0
        self.told: Callable[[int], None] = lambda index: None
        """Called with the number of each shard that this attempt made or adopted."""
        self.use_layout({}, generation)

    @staticmethod
    def begin(request: Request, log: Log) -> tuple[int, str, Manifest | None]:
        """Return the generation to make, a fresh attempt id, and the manifest that is current already, if there is one.

        For rank 0 alone. Ends the current generation if it is stale, and logs why.
        """
        generation, manifest = current_of(request.slot)
        if manifest is not None:
            reason = why_stale(manifest, request)
            if reason is None:
                return generation, manifest.attempt, manifest
            log(f"generation {generation} is made again: {reason}")
            generation = invalidate(request.slot, generation, reason)
        return generation, secrets.token_hex(8), None

    def url(self, *names: str) -> str:
        """Return a URL inside the slot."""
        return store.join(self.request.slot, *names)

    def layout(self, layout: dict[str, Any], log: Log, halvings: int = 0) -> dict[str, Any]:
        """Commit how the work is divided, or return the layout that an earlier attempt committed.

        For rank 0 alone; broadcast the result. If the committed layout has other settings or inputs, its generation is
        ended, because nothing made under it can be part of this artifact. So it is if that layout did not fit into
        memory: it was halved less often than this one. Raises :class:`ArtifactError` if a layout of these settings and
        inputs divides other work.
        """
        while True:
            ours = Layout(
                place=place_of(self.request.slot),
                generation=self.generation,
                layout=layout,
                halvings=halvings,
                **self._made_from,
            )
            store.put_if_absent(Layout.url(self.request.slot, self.generation), ours.sealed())
            found = Layout.read(self.request.slot, self.generation) or ours
            same = (found.recipe, found.inputs) == (ours.recipe, ours.inputs)
            if same and found.halvings >= halvings:
                break
            reason = "did not fit into memory" if same else "had other settings or inputs"
            number = self.generation
            log(f"an unfinished attempt at generation {number} {reason}; nothing of it is kept")
            self.generation = invalidate(self.request.slot, number, f"unfinished, {reason}")
        if (wrong := difference(found.layout, layout)) is not None:
            url = Layout.url(self.request.slot, self.generation)
            raise ArtifactError(f"{url} divides other work than this attempt has: {wrong}; {RESTORE}")
        if found.numerics != self.numerics:
            changes = ", ".join(differences(found.numerics, self.numerics))
            log(f"unfinished shards are not adopted: made under other numerics ({changes})")
        return found.layout

    def use_layout(self, layout: dict[str, Any], generation: int, **made_by: str) -> None:
        """Work by this layout. Every rank calls it.

        Attempts adopt each other's shards if their generation, layout, numerics and ``made_by`` are equal.
        """
        self.generation = generation
        self.shards = shards_of(self._made_from, layout, generation, **made_by)

    def put(self, name: str, data: bytes) -> None:
        """Write one file under this attempt's prefix. Files named ``records/...`` are not part of the content."""
        self.files[name] = self._write(name, data)

    def put_stream(self, name: str, chunks: Iterable[Chunk]) -> None:
        """Write one file like :meth:`put`, from chunks, so that it is never in memory as a whole."""
        self.files[name] = files.write(self.request.slot, f"attempts/{self.id}/{name}", chunks)

    def put_json(self, name: str, value: Any) -> None:
        """Write one JSON file, in canonical form."""
        self.put(name, canonical_json(value))

    def take_over(self, index: int) -> bool:
        """Take the files of a shard that another worker made or adopted just now. That worker has checked their bytes.

        Returns False if it has no marker, or if a file of it is missing.
        """
        marker = self._whole(index)
        self.files |= {} if marker is None else marker.files
        return marker is not None

    def _whole(self, index: int) -> Marker | None:
        """Return the marker of a shard; None if it has none, or if one of its files is missing."""
        marker = self._marked(index)
        if marker is None or None in store.sizes([self.url(entry.path) for entry in marker.files.values()]):
            return None
        return marker

    def _marked(self, index: int) -> Marker | None:
        """Return the marker of a shard; None if it has none. Raises :class:`ArtifactError` if it is another shard's."""
        url = self._marker(index)
        data = store.read_if_exists(url)
        if data is None:
            return None
        marker = Marker.unsealed(data, url, self.request.slot, self.generation)
        if (marker.layout, marker.index) != (self.shards, index):
            raise ArtifactError(
                f"{url} was written for shard {marker.index} of {marker.layout}; put it back, or {MAKE_AGAIN}"
            )
        return marker

    def adopt(self, index: int, check: Check = lambda files: None) -> bool:
        """Adopt a shard that an earlier attempt finished, with every byte checked.

        Returns False if no attempt finished it or a file of it is missing. Raises :class:`ArtifactError` if the marker
        belongs to another shard, or if ``check`` finds other samples in the files.
        """
        marker = self._whole(index)
        if marker is None:
            return False
        url, slot = self._marker(index), self.request.slot
        found = {name: read_stored(slot, entry) for name, entry in marker.files.items()}
        if (wrong := check(found)) is not None:
            raise ArtifactError(f"{url} does not mark the files of shard {index}: {wrong}; restore it, or {MAKE_AGAIN}")
        self.adopted += 1
        self.files |= marker.files
        self.told(index)
        return True

    def finish(
        self,
        index: int,
        made: dict[str, bytes],
        check: Check = lambda files: None,
        *,
        offered: bool = True,
        repeatable: bool = True,
    ) -> None:
        """Write the files of shard ``index``, and mark it as finished, unless another attempt finished it first.

        Without ``offered`` the shard is part of this attempt but no other attempt adopts it. Raises
        :class:`RepeatError` if a ``repeatable`` shard has other results than the one that was finished first.
        """
        entries = {name: self._write(name, data) for name, data in made.items()}
        marker = Marker(
            place=place_of(self.request.slot),
            generation=self.generation,
            layout=self.shards,
            index=index,
            attempt=self.id,
            files=entries,
        )
        if not offered or store.put_if_absent(self._marker(index), marker.sealed()) or not self.adopt(index, check):
            self.files |= entries
            self.told(index)
        elif repeatable:
            self._require_equal(index, entries)

    def _require_equal(self, index: int, second: dict[str, FileEntry]) -> None:
        """Raise :class:`RepeatError` unless a second copy of an adopted shard has the results of the first."""
        results = [name for name in second if not name.startswith(RECORDS)]
        if unlike := [name for name in results if self.files[name].sha256 != second[name].sha256]:
            raise RepeatError(
                f"shard {index} of {self.request.slot} was made twice, under equal numerics, and {', '.join(unlike)} "
                f"differ: {self.url(self.files[unlike[0]].path)} and {self.url(second[unlike[0]].path)}; this stage "
                "does not give equal bits twice. Look for what is not deterministic: launch.deterministic, a plugin, "
                "the machine"
            )

    def _marker(self, index: int) -> str:
        return self.url(self.shards, f"{index:05d}.json")

    def read(self, name: str) -> bytes:
        """Read a file that this attempt made or adopted."""
        return read_entry(self.request.slot, self.files[name])

    def _write(self, name: str, data: bytes) -> FileEntry:
        path = f"attempts/{self.id}/{name}"
        store.write(self.url(path), data)
        return FileEntry(path=path, size=len(data), sha256=sha256(data))

    def commit(self, files: dict[str, FileEntry], summary: dict[str, Any], log: Log) -> Manifest:
        """Commit the artifact with every rank's files, and return its manifest. For rank 0 alone.

        The first of two attempts wins, and the other one returns the winner's manifest. Raises :class:`CosmosRLError`
        if the winner was made from other settings.
        """
        request = self.request
        manifest = Manifest(
            place=place_of(request.slot),
            stage=request.stage,
            version=request.version,
            generation=self.generation,
            attempt=self.id,
            recipe=request.recipe,
            fingerprint=request.fingerprint,
            content=content_of(files),
            iteration=request.iteration,
            seed=request.seed,
            config=request.config.identity(),
            plugins=request.named_plugins,
            inputs=request.inputs,
            files=dict(sorted(files.items())),
            numerics=self.numerics,
            summary=summary,
        )
        data = manifest.sealed()
        if store.put_if_absent(Manifest.url(request.slot, self.generation), data):
            return manifest.found(request.slot, data)
        winner = read_manifest(request.slot, self.generation)
        if winner is None or winner.why_not(request) is not None:
            raise CosmosRLError(
                f"another attempt with other settings committed to {request.slot} meanwhile; run it again"
            )
        log(f"another attempt ({winner.attempt}) committed first; this one is dropped")
        return winner
