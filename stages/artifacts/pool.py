"""The index of an artifact whose files lie in a pool that several artifacts share, and the sweep of that pool.

Whoever makes such an artifact first names in its layout what it will look for (:data:`TEXTS`), then asks
:func:`check_not_swept`, then looks into the pool. A sweep first says so (:func:`sweeping`), then reads all layouts and
indexes, then deletes. So either the sweep sees the names, or the other sees the sweep.
"""

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from cosmos_rl_core.canonical import from_json, sha256
from cosmos_rl_core.errors import UnavailableError, advised
from cosmos_rl_core.storage import store
from stages.artifacts.artifact import Artifact
from stages.artifacts.files import read_entry
from stages.artifacts.manifest import Manifest
from stages.artifacts.records import FileEntry, Layout, store_of
from stages.artifacts.slots import read_manifest

POOL = "embeddings"
"""The pool's folder, next to the slots that it belongs to."""
PICTURES = "references"
"""The folder of the pool of pictures and clips that prompts refer to. The name of each is its digest."""
POOLED = ("embed", "references", "index")
"""The stages whose artifacts have an index of files of a pool; a part of a dataset only if items have references."""
INDEX = "index.json"
"""Name of the file with the path, the size and the sha256 of the file of each id."""
TEXTS = "texts"
"""Names, in a layout, of the files that are looked for in the pool or written into it."""
ENDING = ".safetensors"
"""End of the name of a file of the pool."""
_SWEEP = "sweep"
_GENERATION = re.compile(r"(manifest|layout)\.([1-9][0-9]*)\.json")


class Named(NamedTuple):
    """Files of the pool that slots name."""

    paths: frozenset[str] = frozenset()
    """Paths next to the slots, named by indexes."""
    names: frozenset[str] = frozenset()
    """Names without folder and ending, from layouts of unfinished artifacts."""

    def has(self, path: str) -> bool:
        """Return whether a file is named."""
        # Pictures have no ending.
        return path in self.paths or path.rpartition("/")[2].removesuffix(ENDING) in self.names


def index_of(entries: Mapping[str, FileEntry]) -> dict[str, Any]:
    """Return the index of an artifact for JSON: path, size and sha256 of each id."""
    return {one: [entry.path, entry.size, entry.sha256] for one, entry in entries.items()}


def entries_of(artifact: Artifact) -> dict[str, FileEntry]:
    """Return the files of the pool that an artifact has, by id."""
    return _entries(artifact.json(INDEX))


def named_in(slot: str, files: Iterable[str]) -> Named:
    """Return what the artifacts of a slot name, of all its generations; ``files`` are the names of its files.

    Raises :class:`ArtifactError` for a damaged record or index.
    """
    found = {match.groups() for match in map(_GENERATION.fullmatch, files) if match}
    paths: set[str] = set()
    names: set[str] = set()
    for kind, number in found:
        if kind == "manifest" and (manifest := read_manifest(slot, int(number))) is not None:
            if manifest.stage in POOLED and (entry := manifest.files.get(INDEX)) and not _is_old(manifest):
                paths |= {one.path for one in _entries(from_json(read_entry(manifest.slot, entry))).values()}
        elif kind == "layout" and ("manifest", number) not in found:
            layout = Layout.read(slot, int(number))
            names |= {*layout.layout.get(TEXTS, ())} if layout else set()
    return Named(frozenset(paths), frozenset(names))


def check_not_swept(root: str) -> None:
    """Raise :class:`UnavailableError` while files of the pool next to the slots of ``root`` are being deleted."""
    if store.size(mark := store.join(root, POOL, _SWEEP)) is not None:
        raise UnavailableError(
            f"embeddings that nothing names are being deleted ({mark}); try again when that has ended; if it was "
            f"killed, give it once more: `{advised('data gc', store=store_of(root))}`"
        )


def put_picture(root: str, data: bytes) -> FileEntry:
    """Write a picture into the pool next to the slots of ``root``, and date it as written now if it is there.

    For who names it only later: no sweep takes what is as young. Raises :class:`UnavailableError` during one.
    """
    entry = FileEntry(path=f"{PICTURES}/{sha256(data)}", size=len(data), sha256=sha256(data))
    while True:
        check_not_swept(root)
        store.write(url := store.join(root, entry.path), data)
        # A sweep that took the older file from under this write has ended by now.
        check_not_swept(root)
        if store.size(url) is not None:
            return entry


def renewed_picture(root: str, name: str) -> FileEntry | None:
    """Date a picture as written now, like :func:`put_picture`. Return None if it is not there whole."""
    data = store.read_if_exists(store.join(root, PICTURES, name))
    return put_picture(root, data) if data is not None and sha256(data) == name else None


def is_announced(names: Container[str]) -> bool:
    """Return whether a sweep was announced and has not ended, by the names of all files next to the slots."""
    return f"{POOL}/{_SWEEP}" in names


@contextmanager
def sweeping(root: str) -> Iterator[None]:
    """Keep others from beginning to look into the pool. A kill leaves the mark to the next sweep."""
    mark = store.join(root, POOL, _SWEEP)
    store.write(mark, b"")
    try:
        yield
    finally:
        store.remove(mark)


def _is_old(manifest: Manifest) -> bool:
    """Return whether an artifact has embeddings in shards, which earlier versions made: its index names no file."""
    return manifest.stage == "embed" and manifest.version == 1


def _entries(index: Mapping[str, Any]) -> dict[str, FileEntry]:
    return {one: FileEntry(path=path, size=size, sha256=found) for one, (path, size, found) in index.items()}
