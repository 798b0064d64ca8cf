"""Tar shards in webdataset's layout, with members ``<key>.<extension>``. Equal files give equal bytes."""

import io
import tarfile
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage.tensor_headers import Readable, read_header

_BLOCK = 2**14


@dataclass(frozen=True)
class Piece:
    """Consecutive bytes of a file and their digest."""

    start: int
    end: int
    sha256: str


@dataclass(frozen=True)
class TensorPiece(Piece):
    """The bytes of one tensor."""

    name: str
    dtype: str
    """Name of the type in the safetensors format."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Member:
    """A member's place in its shard: one piece, or the header and the tensors of a safetensors file."""

    pieces: tuple[Piece, ...]

    @property
    def tensors(self) -> dict[str, TensorPiece]:
        """Return the member's tensors by name; empty if it is not a safetensors file."""
        return {piece.name: piece for piece in self.pieces if isinstance(piece, TensorPiece)}


def pack(files: dict[str, bytes]) -> bytes:
    """Return a tar of ``files``, given by member name: sorted, without times or owners."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(files):
            member = tarfile.TarInfo(name)
            member.size = len(files[name])
            tar.addfile(member, io.BytesIO(files[name]))
    return buffer.getvalue()


def unpack(data: bytes) -> dict[str, bytes]:
    """Return the bytes of each member by name. Raises :class:`ArtifactError` if the tar is damaged."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            return {m.name: data[m.offset_data : m.offset_data + m.size] for m in tar if m.isfile()}
    except tarfile.TarError as error:
        raise ArtifactError(f"not a tar shard ({len(data)} bytes): {error}") from error


def members(shard: Readable) -> dict[str, Member]:
    """Return place and digests of each member by name, without holding a member in memory.

    Raises :class:`ArtifactError` if the tar is damaged.
    """
    try:
        # tarfile's types demand more than `read`, but reading in order needs nothing else.
        with tarfile.open(fileobj=cast("Any", shard), mode="r|", bufsize=_BLOCK) as tar:
            return {member.name: _member(tar, member) for member in tar if member.isfile()}
    except tarfile.TarError as error:
        raise ArtifactError(f"not a tar shard: {error}") from error


def _member(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Member:
    file = tar.extractfile(member)
    assert file is not None
    start, size = member.offset_data, member.size
    if member.name.endswith(".safetensors"):
        return tensor_file(file, start, size)
    return Member((Piece(start, start + size, _digest(file, size)),))


def tensor_file(file: Readable, start: int, size: int) -> Member:
    """Return header and tensors of a safetensors file of ``size`` bytes that begins at byte ``start`` of a shard.

    Raises :class:`ArtifactError` if it is no safetensors file, or has another size than its header describes.
    """
    noted = _Noted(file)
    entries = read_header(noted)
    pieces = [Piece(start, start + len(noted.data), sha256(noted.data).hexdigest())]
    for entry in entries:
        place = start + entry.start, start + entry.end, _digest(file, entry.end - entry.start)
        pieces.append(TensorPiece(*place, entry.name, entry.dtype, entry.shape))
    if (described := pieces[-1].end - start) != size:
        found = f"{size} bytes, its header describes {described}"
        raise ArtifactError(f"not a safetensors file: {found}")
    return Member(tuple(pieces))


def _digest(file: Readable, size: int) -> str:
    """Return the sha256 of the next ``size`` bytes, read a block at a time."""
    found = sha256()
    while size > 0 and (block := file.read(min(size, _BLOCK))):
        found.update(block)
        size -= len(block)
    return found.hexdigest()


class _Noted:
    """A stream that keeps the bytes read from it."""

    def __init__(self, file: Readable) -> None:
        self._file, self.data = file, b""

    def read(self, size: int) -> bytes:
        """Return the next bytes."""
        found = self._file.read(size)
        self.data += found
        return found
