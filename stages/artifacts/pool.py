"""The index of an artifact whose files lie in a pool that several artifacts share, and the sweep of that pool.

A stage that makes such an artifact first names in its layout the files that it will look for (:data:`TEXTS`), then
calls :func:`check_not_swept`, then looks into the pool. A sweep first announces itself (:func:`sweeping`), then reads
all layouts and indexes, then deletes. So either the sweep sees the names, or the stage sees the sweep.
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
"""The folder of the pool of pictures and clips that prompts refer to. Each file has its digest as its name."""
POOLED = ("embed", "references", "index")
"""The stages whose artifacts index files of a pool. A part of a dataset does so only if items have references."""
INDEX = "index.json"
"""Name of the file of an artifact that gives, for each id, path, size and sha256 of its file in the pool."""
TEXTS = "texts"
"""Key of a layout: the names of the files that the stage looks for in the pool, or writes into it."""
ENDING = ".safetensors"
"""End of the name of a file of embeddings in the pool."""
_SWEEP = "sweep"
_GENERATION = re.compile(r"(manifest|layout)\.([1-9][0-9]*)\.json")


class Named(NamedTuple):
    """Files of the pool that slots name."""

    paths: frozenset[str] = frozenset()
    """Paths next to the slots, named by indexes."""
    names: frozenset[str] = frozenset()
    """Names without folder and ending, from layouts of unfinished artifacts."""

    def has(self, path: str) -> bool:
        """Return whether a file of the pool, by its path next to the slots, is named."""
        # The names of pictures have no ending.
        return path in self.paths or path.rpartition("/")[2].removesuffix(ENDING) in self.names


def index_of(entries: Mapping[str, FileEntry]) -> dict[str, Any]:
    """Return the index of an artifact for JSON: path, size and sha256 of each id."""
    return {one: [entry.path, entry.size, entry.sha256] for one, entry in entries.items()}


def entries_of(artifact: Artifact) -> dict[str, FileEntry]:
    """Return the files of the pool that an artifact indexes, by id."""
    return _entries(artifact.json(INDEX))


def named_in(slot: str, files: Iterable[str]) -> Named:
    """Return the pool's files that a slot names, in all its generations; ``files`` are the names of the slot's files.

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
            f"killed, run it again: `{advised('data gc', store=store_of(root))}`"
        )


def put_picture(root: str, data: bytes) -> FileEntry:
    """Write a picture into the pool next to the slots of ``root``. If it is there, date it as written now.

    For callers that name it only later: no sweep deletes a file as young. Raises :class:`UnavailableError` during a
    sweep.
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
    """Date a picture as written now, like :func:`put_picture`. Return None if it is missing or damaged."""
    data = store.read_if_exists(store.join(root, PICTURES, name))
    return put_picture(root, data) if data is not None and sha256(data) == name else None


def is_announced(names: Container[str]) -> bool:
    """Return whether a sweep was announced and has not ended, by the names of all files next to the slots."""
    return f"{POOL}/{_SWEEP}" in names


@contextmanager
def sweeping(root: str) -> Iterator[None]:
    """Announce a sweep, so that no stage begins to look into the pool. A kill leaves the mark to the next sweep."""
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
