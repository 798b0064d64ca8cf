"""Bytes on any fsspec URL: written as whole objects only, and one way to decide a race.

An object is written whole or not at all, from bytes in memory; nothing is appended, renamed or listed. Whoever needs a
larger artifact cuts it into objects. :func:`put_if_absent` is the only operation that other writers can contend for.
"""

import errno
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from cosmos_rl_core.errors import UnavailableError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


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
    except _failures() as error:
        raise UnavailableError(f"cannot read {url}: {error}") from error


def read_if_exists(url: str) -> bytes | None:
    """The whole object, or None if there is none."""
    try:
        return read(url)
    except FileNotFoundError:
        return None


def size(url: str) -> int | None:
    """Size of the object in bytes, or None if there is none."""
    fs, path = _resolve(url)
    try:
        return int(fs.info(path)["size"])
    except FileNotFoundError:
        return None
    except _failures() as error:
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
    except _failures() as error:
        raise _failed_write(url, len(data), error) from error


def files(url: str) -> dict[str, int]:
    """Sizes in bytes of all objects under ``url``, by their names below it.

    A listing may lag behind what was written; nothing but the deletion of garbage may go by it.
    """
    fs, path = _resolve(url)
    try:
        found = cast("dict[str, dict[str, int]]", fs.find(path, detail=True))
    except _failures() as error:
        raise UnavailableError(f"cannot list {url}: {error}") from error
    return {name.removeprefix(path).lstrip("/"): int(entry["size"]) for name, entry in found.items()}


def remove(url: str) -> None:
    """Delete an object, if there is one."""
    fs, path = _resolve(url)
    try:
        fs.rm_file(path)
    except FileNotFoundError:
        return
    except _failures() as error:
        raise UnavailableError(f"cannot delete {url}: {error}") from error


def put_if_absent(url: str, data: bytes) -> bool:
    """Write an object only if none of that name exists. True if the object is now ours: exactly these bytes.

    Whatever the store answers (exists, precondition failed, a timeout after which the write may or may not have
    happened), the object is read back and compared, so callers that contend must write different bytes, e.g. with an
    attempt id in them.
    """
    fs, path = _resolve(url)
    try:
        if isinstance(fs, LocalFileSystem):
            _link_local(Path(path), data)
        else:
            fs.pipe_file(path, data, mode="create")
    except _failures() as error:
        found = read_if_exists(url)
        if found is None:
            raise _failed_write(url, len(data), error) from error
        return found == data
    return True


def decides_races(root: str) -> bool:
    """Whether conditional writes truly work under ``root``: a second, different write of one object must be refused."""
    probe = join(root, ".probe", secrets.token_hex(8))
    return put_if_absent(probe, b"first") and not put_if_absent(probe, b"second") and read(probe) == b"first"


def _resolve(url: str) -> tuple[AbstractFileSystem, str]:
    fs, path = fsspec.core.url_to_fs(url)
    return fs, str(path)


def _failures() -> tuple[type[Exception], ...]:
    """What a store raises when it fails: botocore, loaded only where S3 is used, has errors that are no ``OSError``."""
    botocore = sys.modules.get("botocore.exceptions")
    return (OSError,) if botocore is None else (OSError, botocore.BotoCoreError)


def _failed_write(url: str, num_bytes: int, error: Exception) -> UnavailableError:
    if isinstance(error, OSError) and error.errno in _FULL:
        return UnavailableError(
            f"no space left to write {num_bytes} bytes to {url}: {error.strerror}; free some and run again"
        )
    return UnavailableError(f"cannot write {url}: {error}")


def _write_local(path: Path, data: bytes) -> None:
    _publish_local(path, data, os.replace)


def _link_local(path: Path, data: bytes) -> None:
    # A hard link fails if the name exists, on every local and most network file systems; a rename would replace it.
    _publish_local(path, data, os.link)


def _publish_local(path: Path, data: bytes, publish: Callable[[Path, Path], None]) -> None:
    """Write beside ``path``, then give it its name: whatever stops the writing, no part of an object has the name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
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
