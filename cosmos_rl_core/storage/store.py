"""Read and write whole objects on local paths and fsspec URLs.

An object is written whole or not at all; nothing is appended or renamed. :func:`put_if_absent` is the only operation
that decides a race between writers.
"""

import errno
import fcntl
import importlib
import math
import os
import re
import secrets
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO, TypeVar, cast

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from cosmos_rl_core import errors
from cosmos_rl_core.errors import FREE_SPACE, FULL, ConfigError, NoSpaceError, UnavailableError, UnreadableError
from cosmos_rl_core.listing import listings
from cosmos_rl_core.listing.stamps import is_hidden, local_stamp, local_stamps, stamp_in
from cosmos_rl_core.processes import TRAFFIC


@dataclass(frozen=True)
class Listed:
    """An entry of a listing."""

    size: int
    """Size in bytes."""
    written_s: float
    """Time of the last write, in seconds since 1970 by the store's clock; infinite if the store does not report it."""
    stamp: str
    """The stamp of :func:`stamps` and the time of the last write. In a store without times it tells nothing."""


AT_ONCE = 4
"""Number of objects that are read ahead or looked up in parallel."""
STREAMED_BYTES = 2**22
"""Number of bytes that a stream fetches at a time."""
Name = TypeVar("Name")
Found = TypeVar("Found")
_LOCAL = LocalFileSystem()
Chunk = bytes | memoryview
"""Consecutive bytes of an object."""


def join(url: str, *names: str) -> str:
    """Append path components to a URL or a local path. A bare ``s3://`` keeps its slashes."""
    return "/".join([re.sub("(?<!s3:)(?<!s3:/)/+$", "", url), *names])


def absolute(url: str) -> str:
    """Make a local path absolute, so that every process finds the same place; return other URLs unchanged."""
    return url if "://" in url else str(Path(url).resolve())


def read(url: str, start: int | None = None, end: int | None = None) -> bytes:
    """Return the whole object, or its bytes from ``start`` up to ``end``.

    Raises ``FileNotFoundError`` if the object does not exist, :class:`UnavailableError` if the store does not answer,
    :class:`UnreadableError` for a folder, or without permission.
    """
    fs, path = _resolve(url)
    with TRAFFIC.waiting(), _unavailable("read", url, FileNotFoundError):
        if fs is _LOCAL and start is end is None:
            with open(path, "rb") as file:
                data = file.read()
        else:
            data = cast("bytes", fs.cat_file(path, start=start, end=end))
    TRAFFIC.add(read=len(data))
    return data


def read_if_exists(url: str) -> bytes | None:
    """Return the whole object, or None if it does not exist."""
    known = listings.listing_of(url, _listing)
    if known is not None and url not in known.files and url not in known.names:
        return None
    try:
        return read(url)
    except FileNotFoundError:
        return None


def stream(url: str) -> BinaryIO:
    """Open an object as a file that fetches its bytes on demand.

    Raises ``FileNotFoundError`` if the object does not exist.
    """
    fs, path = _resolve(url)
    return cast("BinaryIO", fs.open(path, "rb", block_size=STREAMED_BYTES))


def size(url: str) -> int | None:
    """Return the object's size in bytes, or None if it does not exist."""
    known = listings.listing_of(url, _listing)
    if known is not None and url not in known.names:
        return None if (found := known.files.get(url)) is None else found.size
    fs, path = _resolve(url)
    with suppress(FileNotFoundError), _unavailable("look up", url, FileNotFoundError):
        # fsspec takes ten times as long, and `status` looks at thousands of files.
        return os.stat(path).st_size if fs is _LOCAL else int(fs.info(path)["size"])
    return None


def write(url: str, data: bytes) -> None:
    """Write or replace an object, whole and durably.

    Raises :class:`UnavailableError` if the store is full or does not answer, :class:`ConfigError` without permission.
    """
    with TRAFFIC.waiting(), _unavailable("write", url):
        _put(url, data, replace=True)


def write_stream(url: str, chunks: Iterable[Chunk]) -> None:
    """Write or replace an object without holding it in memory.

    Stores other than local directories need a temporary file of its size. If ``chunks`` raises, the object is not
    written. Raises like :func:`write`, and errors of ``chunks`` pass unchanged.
    """
    fs, path = _resolve(url)
    listings.forget(url)
    with _unavailable("write", url):
        if isinstance(fs, LocalFileSystem):
            _publish(Path(path), _counted(chunks), os.replace)
            return
        with NamedTemporaryFile() as file:
            file.writelines(_counted(chunks))
            file.flush()
            fs.put_file(file.name, path)


def _counted(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    for chunk in chunks:
        TRAFFIC.add(written=len(chunk))
        yield chunk


def listed(url: str) -> dict[str, Listed]:
    """Return all objects under ``url``, by their names relative to it. Raises if a local folder cannot be read.

    A listing may lag behind writes: use it only to delete garbage and to show people what exists.
    """
    fs, path = _resolve(url)
    with _unavailable("list", url):
        found = listings.entries(path) if fs is _LOCAL else cast("listings.Entries", fs.find(path, detail=True))
    return {name.removeprefix(path).lstrip("/"): _listed(entry) for name, entry in found.items()}


def stamps(url: str) -> dict[str, str]:
    """Return a stamp of each object under ``url``, by its name relative to it; hidden objects are left out.

    An object with another size, another time of its last write (local, in nanoseconds) or another ETag and version (S3)
    has another stamp. An edit that keeps all of them goes unnoticed. Raises ``FileNotFoundError`` if a local folder
    does not exist.
    """
    fs, path = _resolve(url)
    with _unavailable("list", url, FileNotFoundError):
        if isinstance(fs, LocalFileSystem):
            if not os.path.isdir(path):
                raise FileNotFoundError(path)
            return dict(local_stamps(path))
        found = cast("dict[str, dict[str, Any]]", fs.find(path, detail=True))
    names = {name.removeprefix(path).lstrip("/"): entry for name, entry in found.items()}
    return {name: stamp_in(entry) for name, entry in names.items() if not any(map(is_hidden, name.split("/")))}


def stamp(url: str) -> str | None:
    """Return the stamp of one object, like :func:`stamps`, or None if it does not exist."""
    fs, path = _resolve(url)
    with suppress(FileNotFoundError), _unavailable("look up", url, FileNotFoundError):
        if not isinstance(fs, LocalFileSystem):
            return stamp_in(fs.info(path))
        if os.path.isfile(path):
            return local_stamp(os.stat(path))
    return None


def _listed(entry: Mapping[str, Any]) -> Listed:
    # Without a time, the object counts as written just now.
    written = entry.get("mtime", entry.get("LastModified", math.inf))
    written_s = written.timestamp() if isinstance(written, datetime) else float(written)
    return Listed(int(entry["size"]), written_s, f"{stamp_in(entry)} {written_s}")


def clock_s(folder: str) -> float:
    """Return the time of the store's own clock, which sets :attr:`Listed.written_s`; works on a full local disk."""
    fs, path = _resolve(folder)
    if isinstance(fs, LocalFileSystem):
        with _unavailable("read the clock of", folder):
            os.utime(path)
            return os.stat(path).st_mtime
    write(join(folder, ".probe", "clock"), secrets.token_bytes(4))
    return listed(join(folder, ".probe"))["clock"].written_s


def abandoned(url: str) -> dict[str, Listed]:
    """Return the temporary files that ended processes left in a local store, by their names relative to ``url``."""
    fs, path = _resolve(url)
    found = listed(url) if isinstance(fs, LocalFileSystem) else {}
    temporary = filter(is_temporary, found)
    return {name: found[name] for name in temporary if not _is_being_written(Path(path, name))}


def is_temporary(name: str) -> bool:
    """Return whether a listed name belongs to the temporary file of an unfinished local write."""
    return re.fullmatch(r"\..+\.[0-9a-f]{16}", name.rpartition("/")[2]) is not None


def _is_being_written(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.ENOENT)
    return False


def names(url: str) -> set[str]:
    """Return the names directly under ``url``, without temporary files; may lag behind writes like :func:`listed`."""
    known = listings.listing_of(url, _listing)
    if known is not None:
        return {*known.names.get(url, ())}
    fs, path = _resolve(url)
    with suppress(FileNotFoundError), _unavailable("list", url, FileNotFoundError):
        found = os.listdir(path) if fs is _LOCAL and os.path.isdir(path) else map(str, fs.ls(path, detail=False))
        return {name for one in found if not is_temporary(name := one.rstrip("/").rpartition("/")[2])}
    return set()


def remove(url: str) -> None:
    """Delete an object if it exists."""
    listings.forget(url)
    fs, path = _resolve(url)
    with suppress(FileNotFoundError), _unavailable("delete", url, FileNotFoundError):
        fs.rm_file(path)


def put_if_absent(url: str, data: bytes) -> bool:
    """Write an object only if it does not exist. Return whether it now holds exactly these bytes.

    After any error (exists, precondition failed, timeout) the object is read back and compared. So writers that
    contend must write different bytes, for example with an attempt id. The object is also read before the write: on a
    store that ignores the condition this protects one writer at a time.
    """
    found = read_if_exists(url)
    if found is None:
        try:
            with _unavailable("write", url):
                _put(url, data, replace=False)
            return True
        except UnavailableError:
            found = read_if_exists(url)
            if found is None:
                raise
    return found == data


def decides_races(root: str) -> bool:
    """Return whether conditional writes work under ``root``: a second, different write of an object must fail."""
    probe = join(root, ".probe", secrets.token_hex(8))
    put_if_absent(probe, b"first")
    with suppress(OSError):
        _put(probe, b"second", replace=False)
    decides = read(probe) == b"first"
    with suppress(errors.CosmosRLError):  # a store may allow no deletions
        remove(probe)
    return decides


def check_readable(root: str) -> None:
    """Raise if the store cannot be read, :class:`ConfigError` for wrong keys or a missing bucket. Write nothing."""
    try:
        read_if_exists(join(root, ".probe", "written"))
    except UnreadableError as error:
        raise ConfigError(f"{root} is no store that can be read: {error}") from error


def check_writable(root: str) -> None:
    """Raise if the store cannot be written, :class:`ConfigError` if the keys do not allow it."""
    write(join(root, ".probe", "written"), b"")


def sizes(urls: Sequence[str]) -> list[int | None]:
    """Return :func:`size` of several objects; remote objects are looked up in parallel."""
    if len(urls) < 2 or "://" not in urls[0] or listings.looks_in_listings():
        return [size(url) for url in urls]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(size, urls))


def ahead(names: Iterable[Name], read: Callable[[Name], Found]) -> Generator[tuple[Name, Found]]:
    """Yield each name and ``read(name)``, in order, while threads in the background read the next ones.

    Memory holds at most ``AT_ONCE`` results besides the one that the caller works on. An error is raised when its name
    is next. The threads end with the iterator: close it if it may not be read to its end.
    """
    left = iter(names)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        coming = deque((name, pool.submit(read, name)) for name in islice(left, AT_ONCE))
        try:
            while coming:
                name, data = coming.popleft()
                with TRAFFIC.waiting():
                    found = data.result()
                coming.extend((later, pool.submit(read, later)) for later in islice(left, 1))
                yield name, found
        finally:
            for _, data in coming:
                data.cancel()


def _listing(folder: str) -> listings.Listing | None:
    fs, path = _resolve(folder)
    found = listings.local_files(path) if fs is _LOCAL else listed(folder)
    seen = {n: listings.Seen(one.size, one.stamp) for n, one in (found or {}).items() if not is_temporary(n)}
    return None if found is None else listings.Listing.of(folder, seen)


listed_folder = partial(listings.listed_folder, listed=_listing)
"""Return the listed folder that a file is in, and all its files by URL, or None; see :mod:`cosmos_rl_core.listing`."""


@contextmanager
def _unavailable(action: str, url: str, passed: type[OSError] | tuple[()] = ()) -> Iterator[None]:
    """Turn any ``OSError`` except ``passed`` into one of :func:`errors.misplaced` or an :class:`UnavailableError`."""
    try:
        yield
    except passed:
        raise
    except OSError as error:
        if (lasting := errors.misplaced(error, action, url)) is not None:
            raise lasting from error
        if error.errno in FULL:
            full = f"no space left to {action} {url}: {error.strerror}"
            raise NoSpaceError(f"{full}; {FREE_SPACE}") from error
        raise UnavailableError(f"cannot {action} {url}: {error}") from error


def _resolve(url: str) -> tuple[AbstractFileSystem, str]:
    if url.startswith("s3://"):
        # Imported on demand: it takes half a second, and most stores are directories.
        fs = importlib.import_module("cosmos_rl_core.storage.s3").filesystem(url)
        return fs, url.removeprefix("s3://")
    if url.startswith("/"):
        # The same as from `url_to_fs`, which takes a tenth of a millisecond: `status` looks at thousands of files.
        return _LOCAL, url.rstrip("/") or "/"
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        expected = "a store is a directory or s3://bucket/prefix"
        raise ConfigError(f"{url}: {error}; {expected}") from error
    return fs, str(path)


def _put(url: str, data: bytes, *, replace: bool) -> None:
    """Write an object. Raises ``OSError`` on failure, or if the object exists and ``replace`` is false."""
    listings.forget(url)
    fs, path = _resolve(url)
    TRAFFIC.add(written=len(data))
    if isinstance(fs, LocalFileSystem):
        # A hard link fails if the name exists, on every local and most network file systems; a rename replaces it.
        _publish(Path(path), [data], os.replace if replace else os.link)
    else:
        fs.pipe_file(path, data, mode="overwrite" if replace else "create")


def _publish(path: Path, chunks: Iterable[Chunk], publish: Callable[[Path, Path], None]) -> None:
    """Write a temporary file next to ``path``, its name cut to fit, then rename it: no partial object has the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.fsdecode(os.fsencode(path.name)[:200])}.{secrets.token_hex(8)}")
    try:
        with temporary.open("wb") as file:
            # The lock ends with the process, so files being written differ from files that killed processes left.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_SH)
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
