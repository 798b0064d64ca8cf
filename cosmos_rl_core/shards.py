"""Tar shards in webdataset's layout: ``<key>.<extension>`` members, the same bytes for the same files."""

import io
import tarfile
from dataclasses import dataclass

from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.errors import ArtifactError


@dataclass(frozen=True)
class Member:
    """Where a member lies in its shard, and what it holds."""

    start: int
    end: int
    sha256: str


def pack(files: dict[str, bytes]) -> bytes:
    """A tar of ``files`` by member name, sorted, without times or owners."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(files):
            member = tarfile.TarInfo(name)
            member.size = len(files[name])
            tar.addfile(member, io.BytesIO(files[name]))
    return buffer.getvalue()


def unpack(data: bytes) -> dict[str, bytes]:
    """Member name to bytes. Raises :class:`ArtifactError` if this is not a whole tar."""
    return {name: data[start:end] for name, (start, end) in _places(data).items()}


def members(data: bytes) -> dict[str, Member]:
    """Member name to place and digest. Raises :class:`ArtifactError` if this is not a whole tar."""
    return {name: Member(start, end, sha256(data[start:end])) for name, (start, end) in _places(data).items()}


def _places(data: bytes) -> dict[str, tuple[int, int]]:
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            return {
                member.name: (member.offset_data, member.offset_data + member.size) for member in tar if member.isfile()
            }
    except tarfile.TarError as error:
        raise ArtifactError(f"not a tar shard ({len(data)} bytes): {error}") from error
