"""Slots, generations and commits: how an artifact comes to stand, and how its bytes are read back.

A slot holds ``manifest.1.json``, ``manifest.2.json``, ...; ``invalidated.<n>.json`` ends generation n. The standing
generation is the first that is not invalidated, found by probing, never by listing. Files lie under
``attempts/<attempt id>/``, so that attempts never meet; only layouts, shard markers and manifests are contended for,
each by one put-if-absent.
"""

import json
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cosmos_rl_core import store
from cosmos_rl_core.canonical import canonical_json, digest, sha256
from cosmos_rl_core.errors import ArtifactError, CosmosRLError
from cosmos_rl_core.numerics import differences
from cosmos_rl_core.sealed import RESTORE, unseal
from cosmos_rl_core.store import Chunk
from cosmos_rl_core.weights.parts import CURRENT
from stages import files
from stages.contracts import Input, Request
from stages.files import read_entry, read_stored
from stages.generations import current_generation, invalidate
from stages.layouts import Check, difference
from stages.manifest import Manifest, Reference, Referral, content_of
from stages.records import Dropped, FileEntry, Layout, Marker, place_of

Log = Callable[[str], None]
MAKE_AGAIN = "remove it to have this shard made again"


def standing(slot: str) -> tuple[int, Manifest | None]:
    """The slot's generation (1, 2, ...) that is not invalidated, and its manifest if it has been committed."""
    generation = current_generation(slot)
    return generation, read_manifest(slot, generation)


def read_manifest(slot: str, generation: int) -> Manifest | None:
    """One generation's manifest, also where the slot only refers to it.

    Raises :class:`ArtifactError` if it is damaged, or there is something else in its place.
    """
    url = Manifest.url(slot, generation)
    data = store.read_if_exists(url)
    if data is None:
        return None
    body = unseal(data, Manifest.kind, url)
    if "reference" in body:
        return _referred(Referral.checked(body, url, slot, generation).reference)
    return Manifest.checked(body, url, slot, generation).found(slot, data)


def refer(slot: str, source: Input) -> Manifest:
    """Let the slot's standing generation be an artifact that lies elsewhere.

    Raises :class:`ArtifactError` if it has one of its own.
    """
    generation, _ = standing(slot)
    reference = Reference(
        url=source.url, generation=source.generation, manifest=source.manifest, fingerprint=source.fingerprint
    )
    record = Referral(place=place_of(slot), generation=generation, reference=reference)
    if not store.put_if_absent(Manifest.url(slot, generation), record.sealed()):
        raise ArtifactError(f"{slot} has an artifact of its own; invalidate it before it can refer to another")
    return _referred(reference)


def _referred(there: Reference) -> Manifest:
    data = _manifest_bytes(there)
    found = Manifest.unsealed(data, Manifest.url(there.url, there.generation), there.url, there.generation)
    return found.found(there.url, data, referred=True)


def _manifest_bytes(source: Input | Reference) -> bytes:
    """The bytes of exactly the manifest that is named."""
    url = Manifest.url(source.url, source.generation)
    data = store.read_if_exists(url)
    if data is None or sha256(data) != source.manifest:
        raise ArtifactError(f"{url} is {'missing' if data is None else 'not the manifest that was asked for'}")
    return data


def why_stale(manifest: Manifest, request: Request) -> str | None:
    """Why the artifact must be made again: other settings, other inputs, a missing file. None if it stands.

    Raises :class:`ArtifactError` if a file is there with another size: wrong bytes are never rebuilt in silence.
    """
    if (reason := manifest.why_not(request)) is not None:
        return reason
    urls = [store.join(manifest.slot, entry.path) for entry in manifest.files.values()]
    for (name, entry), url, found in zip(manifest.files.items(), urls, store.sizes(urls), strict=True):
        if found is None and name.partition("/")[0] in _dropped(manifest):
            continue
        if found is None:
            return f"{name} is missing ({url})"
        if found != entry.size:
            raise ArtifactError(
                f"{url} has {found} bytes, its manifest says {entry.size}; restore it, or invalidate the artifact"
            )
    return None


def drop(slot: str, *parts: str) -> None:
    """Delete parts of the standing artifact for good. It stands as before, and whoever reads them is told.

    A kill in between leaves files that another call removes: what is dropped is on record first.
    """
    generation, manifest = standing(slot)
    if manifest is None or manifest.referred:
        return
    record = Dropped(place=place_of(slot), generation=generation, manifest=manifest.digest, parts=tuple(sorted(parts)))
    store.put_if_absent(Dropped.url(slot, generation), record.sealed())
    for name, entry in manifest.files.items():
        if name.partition("/")[0] in _dropped(manifest):
            store.remove(store.join(slot, entry.path))


def _dropped(manifest: Manifest) -> list[str]:
    found = Dropped.read(manifest.slot, manifest.generation)
    if found is not None and found.manifest != manifest.digest:
        raise ArtifactError(
            f"{Dropped.url(manifest.slot, manifest.generation)} is not of the manifest beside it; restore both"
        )
    return [] if found is None else list(found.parts)


def input_of(slot: str, *parts: str) -> Input:
    """The slot's standing artifact as an input: those of the parts that it has, or all of it where none is named.

    A policy that has none of them gives ``current``: at version 0 all copies are equal.
    Raises :class:`ArtifactError` if there is no artifact.
    """
    _, manifest = standing(slot)
    if manifest is None:
        raise ArtifactError(f"{slot} has no artifact yet")
    found = tuple(part for part in parts if manifest.has_part(part)) or (CURRENT,) * bool(parts)
    return Input(
        url=manifest.slot,
        generation=manifest.generation,
        manifest=manifest.digest,
        fingerprint=manifest.fingerprint,
        content=manifest.part_content(*found),
        parts=found,
    )


def layout_halvings(slot: str, generation: int) -> int:
    """How often a generation's committed layout was halved; 0 where there is none."""
    found = Layout.read(slot, generation)
    return 0 if found is None else found.halvings


class Artifact:
    """A committed artifact, read with every byte checked against its manifest, and the manifest against the Request."""

    def __init__(self, source: Input) -> None:
        self.url = source.url
        url = Manifest.url(source.url, source.generation)
        self.manifest = Manifest.unsealed(_manifest_bytes(source), url, source.url, source.generation)
        if self.manifest.part_content(*source.parts) != source.content:
            raise ArtifactError(f"{source.url} has other contents than the Request names")
        self.parts_dropped = _dropped(self.manifest)

    def names(self, prefix: str = "") -> list[str]:
        """Names of the files that start with ``prefix``, sorted."""
        return sorted(name for name in self.manifest.files if name.startswith(prefix))

    def read(self, name: str) -> bytes:
        """One file's bytes. Raises :class:`ArtifactError` if they are missing or not those of the manifest."""
        return read_entry(self.url, self.entry(name))

    def entry(self, name: str) -> FileEntry:
        """What the manifest says of one file. Raises :class:`ArtifactError` where there is none, or none any more."""
        if name.partition("/")[0] in self.parts_dropped:
            raise ArtifactError(
                f"{name} of {self.url} was deleted, as this run keeps the training state of its newest policies only; "
                "begin again at an earlier policy, or keep more (train.ckpt.max_keep)"
            )
        if name not in self.manifest.files:
            raise ArtifactError(f"{self.url} has no file {name!r}; it has {', '.join(self.names())}")
        return self.manifest.files[name]

    def json(self, name: str) -> Any:
        """One JSON file."""
        return json.loads(self.read(name))

    def bring_to(self, directory: Path) -> list[str]:
        """Have every file, its bytes checked, in a local directory: links where the store is one; returns their
        names."""
        bring = files.copy if "://" in self.url else files.link
        for name in self.names():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            bring(self.url, self.entry(name), directory / name)
        return self.names()


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
