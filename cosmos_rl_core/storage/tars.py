"""Files in tars from other people, found without trusting the tars. Nothing is extracted or decompressed."""

import io
import tarfile
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

MAX_NAME_BYTES = 1024
"""Largest length of a file's name with its folders, in bytes."""
MAX_RECORDS_BYTES = 2**16
"""Largest extra header before a file's own, in bytes: a long name, or records of pax."""

_BLOCK = tarfile.BLOCKSIZE
_LONG_NAME, _PAX, _PAX_OF_ALL = b"L", b"x", b"g"
_REFUSED = {
    b"1": "a hard link",
    b"2": "a link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a pipe",
    b"K": "a link",
    b"S": "a sparse file",
}
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
"""First bytes of gzip, bzip2, xz and zstd."""


class TarError(ValueError):
    """A tar that cannot be used. The message says why."""


class File(NamedTuple):
    """A file in a tar."""

    name: str
    """Path with ``/``, without ``.`` and doubled slashes."""
    start: int
    """Place of its first byte in the tar."""
    size: int


def files(tar: BinaryIO) -> Iterator[File]:
    """Yield the files of a tar in their order. Folders are left out.

    Raises :class:`TarError` on anything else than files and folders, on names that lead out of the folder or come
    twice, and on a tar that is compressed, damaged, or without the zeros at its end: one whose writing was cut short.
    Reads headers only, each at a later place than the last, so that no tar can make it loop or fill the memory.
    """
    # tarfile itself takes a damaged header for the end, reads long names whole and follows sizes backwards.
    end = tar.seek(0, io.SEEK_END)
    place, seen = 0, set[str]()
    named: dict[str, str] = {}
    while (header := _header(tar, place, end)) is not None:
        size = int(named.pop("size", header.size))
        if header.isdir():
            size = 0
        start, place = place + _BLOCK, place + _BLOCK + -(-size // _BLOCK) * _BLOCK
        if size < 0 or start + size > end:
            raise TarError(
                f"{header.name!r} has {size} bytes, of which {max(0, end - start)} are there: it is cut short"
            )
        if header.type in (_LONG_NAME, _PAX, _PAX_OF_ALL):
            if size > MAX_RECORDS_BYTES:
                raise TarError(f"a header of {size} bytes, at most {MAX_RECORDS_BYTES} are read")
            tar.seek(start)
            named |= _records(header.type, tar.read(size))
            continue
        name = _checked(named.pop("path", header.name))
        if header.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
            what = _REFUSED.get(header.type, f"of the unknown type {header.type!r}")
            raise TarError(f"{name!r} is {what}, expected files and folders")
        if header.isdir():
            continue
        if name in seen:
            raise TarError(f"{name!r} comes twice")
        seen.add(name)
        yield File(name, start, size)


def _header(tar: BinaryIO, place: int, end: int) -> tarfile.TarInfo | None:
    """Return the header at a place; None at the end."""
    tar.seek(place)
    block = tar.read(_BLOCK)
    if place == 0 and block.startswith(_COMPRESSED):
        raise TarError("it is compressed; unpack it, so that its files can be found")
    if len(block) < _BLOCK:
        raise TarError(f"it ends at byte {end} without the zeros of a tar's end: it is cut short")
    if not any(block):
        return None
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except UnicodeDecodeError as error:
        raise TarError(f"the name at byte {place} is not UTF-8") from error
    except tarfile.HeaderError as error:
        raise TarError(f"no header of a file at byte {place}: {error}") from error


def _records(kind: bytes, data: bytes) -> dict[str, str]:
    """Return the name and the size that an extra header states for the file after it."""
    try:
        if kind == _LONG_NAME:
            return {"path": data.rstrip(b"\0").decode()}
        found = {key: value.decode() for key, value in _pax(data) if key in ("path", "size")}
    except UnicodeDecodeError as error:
        raise TarError("a name is not UTF-8") from error
    if kind == _PAX_OF_ALL and found:
        raise TarError(f"a header gives all files one {' and '.join(found)}")
    if not found.get("size", "0").isdecimal() or len(found.get("size", "")) > 19:
        raise TarError(f"a size of {found['size'][:40]!r}")
    return found


def _pax(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield keys and values of a pax header: records ``<length> <key>=<value>\\n``."""
    while data:
        digits, _, rest = data[:8].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        key, equals, value = data[len(digits) + 1 : length].partition(b"=")
        if not rest or not equals or length > len(data) or not value.endswith(b"\n"):
            raise TarError("a damaged pax header")
        if key.startswith(b"GNU.sparse"):
            raise TarError("it has a sparse file, expected files and folders")
        yield key.decode(), value[:-1]
        data = data[length:]


def _checked(name: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\\" in name:
        raise TarError(f"{name[:200]!r} leads out of the folder")
    if not name.isprintable() or len(name.encode()) > MAX_NAME_BYTES:
        raise TarError(f"the name {name[:200]!r}, expected at most {MAX_NAME_BYTES} printable bytes")
    return "/".join(parts)
