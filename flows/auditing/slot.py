"""The records of one slot: its layouts, its generations and their ends, its deleted parts."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import TypeVar

from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import unseal
from cosmos_rl_core.weights.parts import TRAINING_ONLY
from flows.auditing.checks.faults import Findings
from stages.artifacts.manifest import Manifest
from stages.artifacts.records import (
    Dropped,
    FileEntry,
    Invalidated,
    Layout,
    Marker,
    Record,
    parsed,
    place_of,
    records_in,
)
from stages.artifacts.slots import read_manifest
from stages.contracts import MEDIA, TENSORS

Read = TypeVar("Read", bound=Record)

DELETED = (MEDIA, TENSORS, *TRAINING_ONLY)
"""The parts that retention deletes."""


def marker_at(url: str, slot: str, shards: str, name: str) -> Marker:
    """Return the marker of a finished shard. Raises :class:`ArtifactError` if it was written for another place."""
    marker = parsed(Marker, unseal(store.read(url), Marker.kind, url), url)
    found = marker.place, marker.layout, f"{marker.index:05d}.json"
    if found != (place_of(slot), shards, name):
        raise ArtifactError(f"written for shard {marker.index} of {marker.layout} in {marker.place}")
    return marker


class Slot:
    """The generations of a slot, read and checked against each other. Faults go to ``findings``."""

    def __init__(self, url: str, findings: Findings) -> None:
        self.url, self._findings = url, findings
        self._names = set[str]()
        self.manifests: dict[int, Manifest] = {}
        """Readable manifests by generation. A reference record has the manifest that it names, of another slot."""
        self._needed = set[int]()
        self.entries: dict[str, FileEntry] = {}
        """The files that its records name, by path."""
        self.ended: dict[int, Invalidated] = {}
        self.records: set[str] = set()
        """Names of the records that were looked for."""
        self.dropped: set[tuple[int, str]] = set()
        """Generation and name of each part that was deleted for good."""
        with findings.catching(url, "file"):
            self._names = store.names(url)
            for generation in self._generations():
                self._look(generation)
            self._look_at_markers()

    @property
    def generation(self) -> int:
        """Return the first generation that was not ended."""
        return next(number for number in count(1) if number not in self.ended)

    @property
    def own(self) -> list[Manifest]:
        """Return the manifests that lie in this slot."""
        return [made for made in self.manifests.values() if made.slot == self.url]

    def need(self, generation: int) -> None:
        """Remember that another run refers to a generation, whose files must be there even after its end."""
        self._needed.add(generation)

    @property
    def current(self) -> Manifest | None:
        """Return the current manifest, or None."""
        return self.manifests.get(self.generation)

    def named(self, data_digest: str) -> Manifest | None:
        """Return the manifest with a digest, of any generation, or None."""
        return next((found for found in self.manifests.values() if found.digest == data_digest), None)

    def may_lack(self, entry: FileEntry) -> bool:
        """Return whether a file may be missing.

        `gc` deletes files that only ended generations and markers name, and retention the parts with a tombstone.
        """
        named = (
            (generation, name.partition("/")[0])
            for generation, made in self.manifests.items()
            if generation == self.generation or generation in self._needed
            for name, file in made.files.items()
            if file == entry
        )
        return all(part in self.dropped for part in named)

    def _generations(self) -> Iterator[int]:
        """Yield the generations that have a record. One may have lost its records, so the next one is looked at too."""
        missing = 0
        for generation in count(1):
            urls = [kind.url(self.url, generation) for kind in (Manifest, Layout, Invalidated)]
            self.records |= {url.rpartition("/")[2] for url in urls}
            there = any(size is not None for size in store.sizes(urls))
            missing = 0 if there else missing + 1
            if missing > 1:
                return
            if there:
                yield generation

    def _look(self, generation: int) -> None:
        end = self._read(Invalidated, generation)
        if end is not None:
            self.ended[generation] = end
        url = Manifest.url(self.url, generation)
        manifest = None
        with self._findings.catching(url, "manifest"):
            manifest = read_manifest(self.url, generation)
            self._check_end(generation, end)
            if manifest is not None:
                self.manifests[generation] = manifest
            if manifest is not None and manifest.slot == self.url:
                self.entries |= {entry.path: entry for entry in manifest.files.values()}
                self._look_for_dropped(generation, manifest)
        layout = self._read(Layout, generation)
        if layout is not None and manifest is not None and layout.recipe != manifest.recipe:
            self._findings.add(Layout.url(self.url, generation), "recipe", "differs from the manifest's")
        if generation > 1 and generation - 1 not in self.ended:
            before = Invalidated.url(self.url, generation - 1)
            self._findings.add(before, "file", f"missing, but there is generation {generation} after it")

    def _check_end(self, generation: int, end: Invalidated | None) -> None:
        """Raise :class:`ArtifactError` if the end names another manifest than the one that is there."""
        if end is None or end.manifest is None:
            return
        data = store.read_if_exists(Manifest.url(self.url, generation))
        if data is None:
            raise ArtifactError(f"missing; {Invalidated.url(self.url, generation)} names it")
        if sha256(data) != end.manifest:
            raise ArtifactError(f"not the manifest that {Invalidated.url(self.url, generation)} ended")

    def _look_for_dropped(self, generation: int, manifest: Manifest) -> None:
        """Check the tombstones of a generation. Only a right tombstone excuses missing files."""
        before, _, ending = Dropped.url("", generation, "*").lstrip("/").partition("*")
        named = (name for name in self._names if name.startswith(before) and name.endswith(ending))
        for part in sorted(name.removeprefix(before).removesuffix(ending) for name in named):
            url, record = Dropped.url(self.url, generation, part), self._read(Dropped, generation, part)
            self.records.add(url.rpartition("/")[2])
            if record is None:
                continue
            if record.manifest != manifest.digest:
                self._findings.add(url, "manifest", "of another manifest than the one next to it")
            elif record.part != part:
                self._findings.add(url, "part", "of another part than the one next to it")
            elif part not in DELETED or not manifest.has_part(part):
                told = f"retention deletes {', '.join(DELETED)} of artifacts that have them"
                self._findings.add(url, "part", f"{told}, not {part} of a {manifest.stage}")
            else:
                self.dropped.add((generation, part))

    def _look_at_markers(self) -> None:
        """Read the markers of finished shards, of all generations."""
        folder = store.join(self.url, "shards")
        for shards, name in records_in(folder):
            url = store.join(folder, shards, name)
            with self._findings.catching(url, "marker"):
                self._compare(url, marker_at(url, self.url, f"shards/{shards}", name))

    def _compare(self, url: str, marker: Marker) -> None:
        """Compare the files of a marker with the manifests' files, and add the files that no manifest has."""
        for entry in marker.files.values():
            if self.entries.setdefault(entry.path, entry) != entry:
                self._findings.add(url, entry.path, "other size or digest than in the manifest")

    def _read(self, kind: type[Read], generation: int, *part: str) -> Read | None:
        found: list[Read | None] = [None]
        url = kind.url(self.url, generation, *part)
        read: Callable[[], Read | None] = partial(kind.read, self.url, generation, *part)
        with self._findings.catching(url, kind.kind):
            found[0] = read()
        return found[0]
