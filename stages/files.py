"""The listed files of an artifact, every byte checked, from the store or from this node's copies."""

from cosmos_rl_core import cache, store
from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.shards import Member
from stages.manifest import FileEntry


def read_entry(slot: str, entry: FileEntry) -> bytes:
    """The bytes of one listed file; raises :class:`ArtifactError` unless they are exactly those listed."""
    kept = cache.of_node(slot)
    if kept is None:
        return read_stored(slot, entry)
    return kept.read(entry.sha256, entry.size, lambda: read_stored(slot, entry))


def read_stored(slot: str, entry: FileEntry) -> bytes:
    """As :func:`read_entry`, whatever copies this node has: for who answers for what the store holds."""
    url = store.join(slot, entry.path)
    data = store.read_if_exists(url)
    if data is None:
        raise ArtifactError(f"{url} is missing; its manifest lists it")
    if sha256(data) != entry.sha256:
        raise ArtifactError(
            f"{url} is not what was committed: sha256 {sha256(data)}, expected {entry.sha256}; "
            "restore it, or remove it to have it made again"
        )
    return data


def read_member(slot: str, entry: FileEntry, name: str, member: Member) -> bytes:
    """One member's bytes of a listed shard, once its table was made of the whole; raises :class:`ArtifactError` unless
    they are the same as then."""
    kept = cache.of_node(slot)
    if kept is not None:
        data = kept.read_part(entry.sha256, member.start, member.end)
        if data is not None and sha256(data) == member.sha256:
            return data
        kept.drop(entry.sha256)
    url = store.join(slot, entry.path)
    try:
        data = store.read(url, member.start, member.end)
    except FileNotFoundError as error:
        raise ArtifactError(f"{url} is missing; it was there when this process read it first") from error
    if sha256(data) != member.sha256:
        raise ArtifactError(
            f"{name} in {url} is not what was committed: sha256 {sha256(data)}, expected {member.sha256}; "
            "the file has changed since this process read it first; restore it, or remove it to have it made again"
        )
    return data
