"""Tar shards in webdataset's layout: ``<key>.<extension>`` members, the same bytes for the same files."""

import io
import tarfile

from cosmos_rl_core.errors import ArtifactError


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
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            return {member.name: stream.read() for member in tar if (stream := tar.extractfile(member)) is not None}
    except tarfile.TarError as error:
        raise ArtifactError(f"not a tar shard ({len(data)} bytes): {error}") from error
