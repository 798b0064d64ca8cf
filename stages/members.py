"""Members of an artifact's tar shards, each read when it is asked for, every byte checked."""

from collections import OrderedDict

from cosmos_rl_core import shards
from cosmos_rl_core.errors import ArtifactError
from stages.artifacts import Artifact
from stages.files import read_member

KEPT_BYTES = 2**28
"""Members that were read last are kept, up to this many bytes of them."""


class Members:
    """The members of an artifact's shards.

    A manifest has the digest of a whole shard only. So the first member asked of one reads and checks all of it, and
    keeps where its members lie and their digests; every later one reads its own bytes alone and checks them by those.
    Memory holds one whole shard while it is read first, and ``kept_bytes`` of members ever after.
    """

    def __init__(self, artifact: Artifact, kept_bytes: int = KEPT_BYTES) -> None:
        self.artifact, self.kept_bytes = artifact, kept_bytes
        self._tables: dict[str, dict[str, shards.Member]] = {}
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._size = 0

    def read(self, shard: str, name: str) -> bytes:
        """One member's bytes. Raises :class:`ArtifactError` if they are missing or not those that were committed."""
        data = self._kept.pop((shard, name), None)
        if data is None:
            data = self._read(shard, name)
            self._size += len(data)
        self._kept[shard, name] = data
        while self._size > self.kept_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._size -= len(oldest)
        return data

    def _read(self, shard: str, name: str) -> bytes:
        if shard not in self._tables:
            whole = self.artifact.read(shard)
            self._tables[shard] = shards.members(whole)
            member = self._member(shard, name)
            return whole[member.start : member.end]
        member = self._member(shard, name)
        return read_member(self.artifact.url, self.artifact.manifest.files[shard], name, member)

    def _member(self, shard: str, name: str) -> shards.Member:
        table = self._tables[shard]
        if name not in table:
            raise ArtifactError(f"{shard} of {self.artifact.url} has no member {name!r}; it has {len(table)} others")
        return table[name]
