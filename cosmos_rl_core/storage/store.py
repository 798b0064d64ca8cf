"""Bytes on any fsspec URL: written as whole objects only, and one way to decide a race.

An object is written whole or not at all; nothing is appended, renamed or listed. :func:`put_if_absent` is the only
operation that other writers can contend for.
"""

import errno
import fcntl
import importlib
import os
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO, TypeVar, cast

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from cosmos_rl_core.errors import FREE_SPACE, FULL, ConfigError, NoSpaceError, UnavailableError


@dataclass(frozen=True)
class Listed:
    """An object, as a listing has it."""

    size: int
    """In bytes."""
    written_s: float
    """When, in seconds since 1970 by the store's clock."""


AT_ONCE = 4
"""Objects that are read ahead of their use, or asked for side by side."""

STREAMED_BYTES = 2**22
"""Of a stream, fetched at once."""

Name = TypeVar("Name")

Chunk = bytes | memoryview
"""Some of an object's bytes."""


def join(url: str, *names: str) -> str:
    """Append path components to a URL or a local path."""
    return "/".join([url.rstrip("/"), *names])


def absolute(url: str) -> str:
    """Make a local path absolute, so that a URL means the same in every process; other URLs stay as they are."""
    return url if "://" in url else str(Path(url).resolve())


def read(url: str, start: int | None = None, end: int | None = None) -> bytes:
    """The whole object, or its bytes from ``start`` up to ``end``.

    Raises ``FileNotFoundError`` if there is none, :class:`UnavailableError` if the store does not answer.
    """
    fs, path = _resolve(url)
    try:
        return cast("bytes", fs.cat_file(path, start=start, end=end))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnavailableError(f"cannot read {url}: {error}") from error


def read_if_exists(url: str) -> bytes | None:
    """The whole object, or None if there is none."""
    try:
        return read(url)
    except FileNotFoundError:
        return None


def stream(url: str) -> BinaryIO:
    """The object as a file, fetched as it is read. Raises ``FileNotFoundError`` if there is none."""
    fs, path = _resolve(url)
    return cast("BinaryIO", fs.open(path, "rb", block_size=STREAMED_BYTES))


def size(url: str) -> int | None:
    """Size of the object in bytes, or None if there is none."""
    fs, path = _resolve(url)
    try:
        return int(fs.info(path)["size"])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnavailableError(f"cannot look up {url}: {error}") from error


def write(url: str, data: bytes) -> None:
    """Write an object whole, durably; replaces one of that name.

    Raises :class:`UnavailableError` on a full or absent store.
    """
    fs, path = _resolve(url)
    try:
        if isinstance(fs, LocalFileSystem):
            _write_local(Path(path), data)
        else:
            fs.pipe_file(path, data)
    except OSError as error:
        raise _failed_write(url, len(data), error) from error


def write_stream(url: str, chunks: Iterable[Chunk]) -> None:
    """As :func:`write`, an object that is never in memory as a whole; on other stores than a directory it is gathered
    in a temporary file first.

    Whatever stops the chunks, nothing has the name. Raises as :func:`write`, and what the chunks raise.
    """
    fs, path = _resolve(url)
    size = 0

    def counted() -> Iterator[Chunk]:
        nonlocal size
        for chunk in chunks:
            size += len(chunk)
            yield chunk

    try:
        if isinstance(fs, LocalFileSystem):
            _publish_local(Path(path), counted(), os.replace)
            return
        with NamedTemporaryFile() as file:
            file.writelines(counted())
            file.flush()
            fs.put_file(file.name, path)
    except OSError as error:
        raise _failed_write(url, size, error) from error


def files(url: str) -> dict[str, int]:
    """Sizes in bytes of all objects under ``url``, by their names below it; as late as :func:`listed`."""
    return {name: entry.size for name, entry in listed(url).items()}


def listed(url: str) -> dict[str, Listed]:
    """All objects under ``url``, by their names below it.

    A listing may lag behind what was written; nothing but the deletion of garbage, and what people are shown, may go by
    it.
    """
    fs, path = _resolve(url)
    try:
        found = cast("dict[str, dict[str, Any]]", fs.find(path, detail=True))
    except OSError as error:
        raise UnavailableError(f"cannot list {url}: {error}") from error
    return {name.removeprefix(path).lstrip("/"): _listed(entry) for name, entry in found.items()}


def _listed(entry: Mapping[str, Any]) -> Listed:
    written = entry.get("mtime", entry.get("LastModified"))
    # What does not say when it was written counts as written just now.
    written_s = written.timestamp() if isinstance(written, datetime) else float("inf") if written is None else written
    return Listed(int(entry["size"]), float(written_s))


def clock_s(folder: str) -> float:
    """What time it is by the store's own clock, which :class:`Listed` goes by; a folder that is full can be asked."""
    fs, path = _resolve(folder)
    try:
        if isinstance(fs, LocalFileSystem):
            os.utime(path)
            return os.stat(path).st_mtime
    except OSError as error:
        raise UnavailableError(f"cannot ask {folder} for its time: {error}") from error
    write(join(folder, ".probe", "clock"), secrets.token_bytes(4))
    return listed(join(folder, ".probe"))["clock"].written_s


def abandoned(url: str) -> dict[str, Listed]:
    """Files of a local store that processes which are gone were writing, by their names below ``url``."""
    fs, path = _resolve(url)
    found = listed(url) if isinstance(fs, LocalFileSystem) else {}
    temporary = {name: entry for name, entry in found.items() if is_temporary(name)}
    return {name: entry for name, entry in temporary.items() if not _is_being_written(Path(path, name))}


def is_temporary(name: str) -> bool:
    """Whether a listed name is that of a file of a local store that is being written, or was when its writer ended."""
    return re.fullmatch(r"\..+\.[0-9a-f]{16}", name.rpartition("/")[2]) is not None


def _is_being_written(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
    return False


def names(url: str) -> set[str]:
    """Names of what lies directly below ``url``, objects and folders; as late as :func:`files`."""
    fs, path = _resolve(url)
    try:
        return {str(name).rstrip("/").rpartition("/")[2] for name in fs.ls(path, detail=False)}
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise UnavailableError(f"cannot list {url}: {error}") from error


def remove(url: str) -> None:
    """Delete an object, if there is one."""
    fs, path = _resolve(url)
    try:
        fs.rm_file(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UnavailableError(f"cannot delete {url}: {error}") from error


def put_if_absent(url: str, data: bytes) -> bool:
    """Write an object only if none of that name exists. True if the object is now ours: exactly these bytes.

    Whatever the store answers (exists, precondition failed, a timeout after which the write may or may not have
    happened), the object is read back and compared, so callers that contend must write different bytes, e.g. with an
    attempt id in them. A store that ignores the condition is asked before, which is enough for one writer at a time.
    """
    found = read_if_exists(url)
    if found is None:
        try:
            _create(url, data)
            return True
        except OSError as error:
            found = read_if_exists(url)
            if found is None:
                raise _failed_write(url, len(data), error) from error
    return found == data


def decides_races(root: str) -> bool:
    """Whether conditional writes truly work under ``root``: a second, different write of one object must be refused."""
    probe = join(root, ".probe", secrets.token_hex(8))
    put_if_absent(probe, b"first")
    with suppress(OSError):
        _create(probe, b"second")
    return read(probe) == b"first"


def check_readable(root: str) -> None:
    """Raise what a store that cannot be used raises, :class:`ConfigError` for wrong keys or no bucket; writes
    nothing."""
    read_if_exists(join(root, ".probe", "written"))


def check_writable(root: str) -> None:
    """Raise what a store that cannot be written raises, :class:`ConfigError` for keys that may not."""
    write(join(root, ".probe", "written"), b"")


def sizes(urls: Sequence[str]) -> list[int | None]:
    """:func:`size` of several objects, asked for side by side where each answer takes its time."""
    if len(urls) < 2 or "://" not in urls[0]:
        return [size(url) for url in urls]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(size, urls))


def ahead(names: Iterable[Name], read: Callable[[Name], bytes]) -> Iterator[tuple[Name, bytes]]:
    """Each name, or place in an object, and what ``read`` gives for it, in order; the next ones are read while the
    caller works on one.

    Memory holds at most ``AT_ONCE`` of them besides.
    """
    left = iter(names)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        coming = deque((name, pool.submit(read, name)) for name in islice(left, AT_ONCE))
        try:
            while coming:
                name, data = coming.popleft()
                found = data.result()
                coming.extend((following, pool.submit(read, following)) for following in islice(left, 1))
                yield name, found
        finally:
            for _, data in coming:
                data.cancel()


def _create(url: str, data: bytes) -> None:
    """Write an object on the condition that there is none; raises some ``OSError`` where the store says there is."""
    fs, path = _resolve(url)
    if isinstance(fs, LocalFileSystem):
        _link_local(Path(path), data)
    else:
        fs.pipe_file(path, data, mode="create")


def _resolve(url: str) -> tuple[AbstractFileSystem, str]:
    if url.startswith("s3://"):
        # Only here: its imports take half a second, and most stores are directories.
        fs = importlib.import_module("cosmos_rl_core.storage.s3").filesystem(url)
        return fs, url.removeprefix("s3://")
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{url}: {error}; a store is a directory or s3://bucket/prefix") from error
    return fs, str(path)


def _failed_write(url: str, num_bytes: int, error: OSError) -> UnavailableError:
    if error.errno in FULL:
        return NoSpaceError(f"no space left to write {num_bytes} bytes to {url}: {error.strerror}; {FREE_SPACE}")
    return UnavailableError(f"cannot write {url}: {error}")


def _write_local(path: Path, data: bytes) -> None:
    _publish_local(path, [data], os.replace)


def _link_local(path: Path, data: bytes) -> None:
    # A hard link fails if the name exists, on every local and most network file systems; a rename would replace it.
    _publish_local(path, [data], os.link)


def _publish_local(path: Path, chunks: Iterable[Chunk], publish: Callable[[Path, Path], None]) -> None:
    """Write beside ``path``, then give it its name: whatever stops the writing, no part of an object has the name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("wb") as file:
            # Kept until the process is gone, so that what a killed one left can be told from what is being written.
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
