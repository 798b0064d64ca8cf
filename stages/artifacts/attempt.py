"""One attempt at making an artifact: its layout, its shards, its files, its commit."""

import secrets
from collections.abc import Callable, Iterable
from typing import Any

from cosmos_rl_core.canonical import canonical_json, digest, sha256
from cosmos_rl_core.errors import ArtifactError, CosmosRLError
from cosmos_rl_core.numerics import differences
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import RESTORE
from cosmos_rl_core.storage.store import Chunk
from stages.artifacts import files
from stages.artifacts.files import read_entry, read_stored
from stages.artifacts.generations import invalidate
from stages.artifacts.layouts import Check, difference
from stages.artifacts.manifest import Manifest, content_of
from stages.artifacts.records import FileEntry, Layout, Marker, place_of
from stages.artifacts.request import Request
from stages.artifacts.slots import read_manifest, standing, why_stale

Log = Callable[[str], None]
MAKE_AGAIN = "remove it to have this shard made again"


class Attempt:
    """One try at making a Request's artifact. Every rank has one, with the same id; rank 0 alone commits.

    Build it with :meth:`begin`. A committed artifact that stands is in ``already``; nothing is to be done then.
    """

    def __init__(self, request: Request, numerics: dict[str, Any], generation: int, attempt: str) -> None:
        self.request = request
        self.numerics = numerics
        self.generation = generation
        self.id = attempt
        self.files: dict[str, FileEntry] = {}
        self.adopted = 0
        self._shards = ""

    @staticmethod
    def begin(request: Request, log: Log) -> tuple[int, str, Manifest | None]:
        """Rank 0: the generation to make and a fresh attempt id, or the manifest that already stands.

        Ends the standing generation if it is stale, and says why.
        """
        generation, manifest = standing(request.slot)
        if manifest is not None:
            reason = why_stale(manifest, request)
            if reason is None:
                return generation, manifest.attempt, manifest
            log(f"generation {generation} is made again: {reason}")
            generation = invalidate(request.slot, generation, reason)
        return generation, secrets.token_hex(8), None

    def url(self, *names: str) -> str:
        """A URL inside the slot."""
        return store.join(self.request.slot, *names)

    def layout(self, layout: dict[str, Any], log: Log, halvings: int = 0) -> dict[str, Any]:
        """Commit how the work is cut, or take the cut that an earlier attempt committed.

        Rank 0 only; broadcast the result. A layout of other settings or inputs ends its generation: nothing made under
        it can be part of this artifact. So does one that did not fit into memory: it was halved less often than ours.
        Raises :class:`ArtifactError` for one of these settings and inputs that cuts other work.
        """
        while True:
            ours = Layout(
                place=place_of(self.request.slot),
                generation=self.generation,
                recipe=self.request.recipe,
                inputs=self.request.input_contents,
                layout=layout,
                halvings=halvings,
                numerics=self.numerics,
            )
            store.put_if_absent(Layout.url(self.request.slot, self.generation), ours.sealed())
            found = Layout.read(self.request.slot, self.generation) or ours
            same = (found.recipe, found.inputs) == (ours.recipe, ours.inputs)
            if same and found.halvings >= halvings:
                break
            reason = "did not fit into memory" if same else "had other settings or inputs"
            log(f"an unfinished attempt at generation {self.generation} {reason}; nothing of it is kept")
            self.generation = invalidate(self.request.slot, self.generation, f"unfinished, {reason}")
        if (wrong := difference(found.layout, layout)) is not None:
            url = Layout.url(self.request.slot, self.generation)
            raise ArtifactError(f"{url} is not how this work is cut: {wrong}; {RESTORE}")
        if found.numerics != self.numerics:
            changes = ", ".join(differences(found.numerics, self.numerics))
            log(f"unfinished shards are not adopted: made under other numerics ({changes})")
        return found.layout

    def use_layout(self, layout: dict[str, Any], generation: int) -> None:
        """All ranks: work by this layout. Shards pass between attempts of one generation, layout and equal numerics."""
        self.generation = generation
        key = {
            "recipe": self.request.recipe,
            "inputs": self.request.input_contents,
            "layout": layout,
            "generation": generation,
            "numerics": self.numerics,
        }
        self._shards = f"shards/{digest(key)[:32]}"

    def put(self, name: str, data: bytes) -> None:
        """Write one file of the artifact under this attempt's prefix; one named ``records/...`` is no part of it."""
        self.files[name] = self._write(name, data)

    def put_stream(self, name: str, chunks: Iterable[Chunk]) -> None:
        """As :meth:`put`, a file that is never in memory as a whole."""
        self.files[name] = files.write(self.request.slot, f"attempts/{self.id}/{name}", chunks)

    def put_json(self, name: str, value: Any) -> None:
        """Write one JSON file, in canonical form."""
        self.put(name, canonical_json(value))

    def shard(
        self,
        index: int,
        make: Callable[[], dict[str, bytes]],
        keep: Callable[[dict[str, bytes]], bool] = lambda files: True,
        check: Check = lambda files: None,
    ) -> None:
        """Files of shard ``index``: those of an earlier attempt that finished it, else made now and marked as finished.

        A shard that ``keep`` refuses is part of this attempt but not offered to another. One whose files were lost is
        made again. ``check`` is :meth:`adopt`'s.
        """
        if not self.adopt(index, check):
            made = make()
            self.finish(index, made, check, offered=keep(made))

    def finish(
        self, index: int, made: dict[str, bytes], check: Check = lambda files: None, *, offered: bool = True
    ) -> None:
        """Write the files of shard ``index``, unless another attempt was faster; ``offered`` lets others adopt them."""
        entries = {name: self._write(name, data) for name, data in made.items()}
        marker = Marker(
            place=place_of(self.request.slot),
            generation=self.generation,
            layout=self._shards,
            index=index,
            attempt=self.id,
            files=entries,
        )
        if not offered or store.put_if_absent(self._marker(index), marker.sealed()) or not self.adopt(index, check):
            self.files |= entries

    def _marker(self, index: int) -> str:
        return self.url(self._shards, f"{index:05d}.json")

    def read(self, name: str) -> bytes:
        """Bytes of a file that this attempt made or adopted."""
        return read_entry(self.request.slot, self.files[name])

    def adopt(self, index: int, check: Check = lambda files: None) -> bool:
        """Take a shard that an attempt finished, every byte checked. False if none did, or a file of it is missing.

        Raises :class:`ArtifactError` if its marker is another shard's, or ``check`` finds other samples in its files.
        """
        url = self._marker(index)
        data = store.read_if_exists(url)
        if data is None:
            return False
        marker = Marker.unsealed(data, url, self.request.slot, self.generation)
        if (marker.layout, marker.index) != (self._shards, index):
            raise ArtifactError(
                f"{url} was written for shard {marker.index} of {marker.layout}; put it back, or {MAKE_AGAIN}"
            )
        if None in store.sizes([self.url(entry.path) for entry in marker.files.values()]):
            return False
        found = {name: read_stored(self.request.slot, entry) for name, entry in marker.files.items()}
        if (wrong := check(found)) is not None:
            raise ArtifactError(f"{url} does not mark the files of shard {index}: {wrong}; restore it, or {MAKE_AGAIN}")
        self.adopted += 1
        self.files |= marker.files
        return True

    def _write(self, name: str, data: bytes) -> FileEntry:
        path = f"attempts/{self.id}/{name}"
        store.write(self.url(path), data)
        return FileEntry(path=path, size=len(data), sha256=sha256(data))

    def commit(self, files: dict[str, FileEntry], summary: dict[str, Any], log: Log) -> Manifest:
        """Rank 0: make the artifact stand, with every rank's files.

        Of two attempts the first wins; the other takes its manifest.
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


def layout_halvings(slot: str, generation: int) -> int:
    """How often a generation's committed layout was halved; 0 where there is none."""
    found = Layout.read(slot, generation)
    return 0 if found is None else found.halvings
