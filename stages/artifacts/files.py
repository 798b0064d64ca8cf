"""The files that a manifest lists, every byte checked, from the store or from copies on this node."""

import io
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import cache, store
from cosmos_rl_core.storage.shards import Piece
from cosmos_rl_core.storage.store import Chunk
from cosmos_rl_core.storage.tensor_headers import Readable
from stages.artifacts.records import FileEntry

BLOCK_BYTES = 2**23
"""Bytes fetched at once from a file that is read in order; a few such blocks are in memory."""

SMALL_BYTES, LATEST = 2**20, 8
"""Size in bytes of the largest file that :func:`read_once` keeps, and the most files that it keeps."""

Found = TypeVar("Found")
_LATEST: ContextVar[OrderedDict[str, bytes] | None] = ContextVar("latest", default=None)


def write(slot: str, path: str, chunks: Iterable[Chunk]) -> FileEntry:
    """Write one file from chunks, hashing them as they pass, and return its entry for the manifest."""
    found, size = sha256(), 0

    def hashed() -> Iterator[Chunk]:
        nonlocal size
        for chunk in chunks:
            found.update(chunk)
            size += len(chunk)
            yield chunk

    store.write_stream(store.join(slot, path), hashed())
    return FileEntry(path=path, size=size, sha256=found.hexdigest())


@contextmanager
def read_once() -> Iterator[None]:
    """Read and check a small file only once inside the block, if several readers want it soon after each other.

    This holds for readers in this thread. Memory holds the latest :data:`LATEST` files of at most :data:`SMALL_BYTES`.
    """
    token = _LATEST.set(OrderedDict())
    try:
        yield
    finally:
        _LATEST.reset(token)


def read_entry(slot: str, entry: FileEntry) -> bytes:
    """Read one listed file. Raises :class:`ArtifactError` unless its bytes are exactly those listed."""
    latest = _LATEST.get()
    if latest is None or entry.size > SMALL_BYTES:
        return _read_entry(slot, entry)
    found = latest.pop(entry.sha256, None)
    latest[entry.sha256] = data = _read_entry(slot, entry) if found is None else found
    while len(latest) > LATEST:
        latest.popitem(last=False)
    return data


def _read_entry(slot: str, entry: FileEntry) -> bytes:
    kept = cache.of_node(slot)
    if kept is None:
        return read_stored(slot, entry)
    return kept.read(entry.sha256, entry.size, lambda: read_stored(slot, entry))


def read_stored(slot: str, entry: FileEntry) -> bytes:
    """Read like :func:`read_entry`, but always from the store, and never from a copy on this node.

    For callers that vouch for the bytes in the store.
    """
    url = store.join(slot, entry.path)
    data = store.read_if_exists(url)
    if data is None:
        raise _missing(url)
    _check(url, entry, sha256(data).hexdigest())
    return data


def scan(slot: str, entry: FileEntry, take: Callable[[Readable], Found]) -> Found:
    """Pass one listed file, in order, to ``take``, and return its result.

    Memory holds a few blocks of the file, unless this node keeps copies: a file that it has no copy of is fetched
    whole. Raises :class:`ArtifactError` unless the bytes are exactly those listed; the result must not be used before
    that check, at the end.
    """
    if cache.of_node(slot) is not None:
        return take(io.BytesIO(read_entry(slot, entry)))
    url, digest = store.join(slot, entry.path), sha256()

    def hashed() -> Iterator[bytes]:
        for block in _blocks(url, entry.size):
            digest.update(block)
            yield block

    def check() -> None:
        # ``take`` may not have read all bytes, and the digest is of all.
        for _ in blocks:
            pass
        _check(url, entry, digest.hexdigest())

    blocks = hashed()
    try:
        try:
            found = take(stream_of(blocks))
        except ArtifactError:
            # If the bytes are not the listed ones, that is the error to report.
            check()
            raise
        check()
    except FileNotFoundError as error:
        raise _missing(url) from error
    return found


def copy(slot: str, entry: FileEntry, path: Path) -> None:
    """Copy one listed file to ``path``. Raises like :func:`scan`, and then the copy must not be used."""

    def write(stream: Readable) -> None:
        with path.open("wb") as file:
            while block := stream.read(BLOCK_BYTES):
                file.write(block)

    scan(slot, entry, write)


def link(slot: str, entry: FileEntry, path: Path) -> None:
    """Check one listed file and link to it from ``path``. For a store that is a directory."""
    scan(slot, entry, lambda _: None)
    path.symlink_to(Path(store.join(slot, entry.path)).resolve())


def read_pieces(slot: str, entry: FileEntry, name: str, pieces: Sequence[Piece]) -> bytes:
    """Read consecutive pieces of a listed file whose digests come from an earlier :func:`scan` of the whole file.

    Raises :class:`ArtifactError`, naming ``name``, unless the bytes have those digests.
    """
    start, end = pieces[0].start, pieces[-1].end
    kept = cache.of_node(slot)
    if kept is not None:
        data = kept.read_part(entry.sha256, start, end)
        if data is not None and _unequal(data, pieces) is None:
            return data
        kept.drop(entry.sha256)
    url = store.join(slot, entry.path)
    try:
        data = store.read(url, start, end)
    except FileNotFoundError as error:
        raise ArtifactError(f"{url} is missing; it was there when this process read it first") from error
    if (wrong := _unequal(data, pieces)) is not None:
        raise ArtifactError(
            f"{name} in {url} is not what was committed: sha256 {wrong[0]}, expected {wrong[1]}; "
            "the file has changed since this process read it first; restore it, or remove it to have it made again"
        )
    return data


def stream_of(blocks: Iterator[Chunk]) -> Readable:
    """Return the bytes of consecutive blocks as a stream, which takes a block when the last one is read."""
    return io.BufferedReader(_Stream(blocks))


class _Stream(io.RawIOBase):
    def __init__(self, blocks: Iterator[Chunk]) -> None:
        self._blocks, self._block = blocks, memoryview(b"")

    def readable(self) -> bool:
        """Return True: the stream can be read."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer with the next bytes of a block, and return their number; 0 at the end."""
        if not self._block:
            self._block = memoryview(next(self._blocks, b""))
        view = memoryview(buffer).cast("B")
        count = min(len(view), len(self._block))
        view[:count], self._block = self._block[:count], self._block[count:]
        return count


def _blocks(url: str, size: int) -> Iterator[bytes]:
    """Read the object's blocks in order, up to one byte beyond its listed size, so that surplus bytes are noticed."""

    def read(start: int) -> bytes:
        return store.read(url, start, min(start + BLOCK_BYTES, size + 1))

    return (data for _, data in store.ahead(range(0, size + 1, BLOCK_BYTES), read))


def _unequal(data: bytes, pieces: Sequence[Piece]) -> tuple[str, str] | None:
    """Return the found and the expected digest of the first piece that differs; None if none does."""
    view, start = memoryview(data), pieces[0].start
    for piece in pieces:
        found = sha256(view[piece.start - start : piece.end - start]).hexdigest()
        if found != piece.sha256:
            return found, piece.sha256
    return None


def _missing(url: str) -> ArtifactError:
    return ArtifactError(f"{url} is missing; its manifest lists it")


def _check(url: str, entry: FileEntry, found: str) -> None:
    if found != entry.sha256:
        raise ArtifactError(
            f"{url} is not what was committed: sha256 {found}, expected {entry.sha256}; "
            "restore it, or remove it to have it made again"
        )
