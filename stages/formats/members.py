"""Members of an artifact's tar shards, and their tensors, each read on access with every byte checked."""

import threading
from collections import OrderedDict

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import shards
from cosmos_rl_core.storage.shards import Member, Piece, TensorPiece
from cosmos_rl_core.storage.tensor_headers import Readable
from stages.artifacts.artifact import Artifact
from stages.artifacts.files import read_pieces, scan

KEPT_BYTES = 2**28
"""Bytes of the latest reads that are kept in memory."""


class Members:
    """The members of an artifact's shards. A safetensors file of its own is a shard whose only member has its name.

    A manifest only has the digest of a whole shard. The first access to a shard therefore reads all of it, a block at a
    time, checks it, and notes place and digest of each member and tensor. Later reads fetch single members or tensors,
    and check those digests. At most ``kept_bytes`` stay in memory. Threads may share it.
    """

    def __init__(self, artifact: Artifact, kept_bytes: int = KEPT_BYTES) -> None:
        self.artifact, self.kept_bytes = artifact, kept_bytes
        self._tables: dict[str, dict[str, Member]] = {}
        self._kept: OrderedDict[tuple[str, int, int], bytes] = OrderedDict()
        self._size = 0
        self._keeping, self._scanning = threading.Lock(), threading.Lock()

    def read(self, shard: str, name: str, tensor: TensorPiece | None = None) -> bytes:
        """Read one member, or one of its tensors and nothing else of it.

        Raises :class:`ArtifactError` if it is missing or differs from what was committed.
        """
        pieces: tuple[Piece, ...] = (tensor,) if tensor else self._member(shard, name).pieces
        key = (shard, pieces[0].start, pieces[-1].end)
        data = self._kept.get(key)
        if data is None:
            data = read_pieces(self.artifact.url, self.artifact.entry(shard), name, pieces)
        self._keep(key, data)
        return data

    def tensors(self, shard: str, name: str) -> dict[str, TensorPiece]:
        """Return the types and shapes of a safetensors member's tensors, by name. Raises like :meth:`read`."""
        return self._member(shard, name).tensors

    def _keep(self, key: tuple[str, int, int], data: bytes) -> None:
        """Keep a read as the latest one, and drop the oldest ones beyond the limit."""
        with self._keeping:
            self._size += len(data) - len(self._kept.pop(key, b""))
            self._kept[key] = data
            while self._size > self.kept_bytes:
                _, oldest = self._kept.popitem(last=False)
                self._size -= len(oldest)

    def _member(self, shard: str, name: str) -> Member:
        if shard not in self._tables:
            # One shard at a time: the blocks of one are already read in parallel.
            with self._scanning:
                if shard not in self._tables:
                    self._tables[shard] = self._scan(shard)
        table = self._tables[shard]
        if name not in table:
            raise ArtifactError(f"{shard} of {self.artifact.url} has no member {name!r}; it has {len(table)} others")
        return table[name]

    def _scan(self, shard: str) -> dict[str, Member]:
        entry = self.artifact.entry(shard)

        def members(stream: Readable) -> dict[str, Member]:
            if shard.endswith(".tar"):
                return shards.members(stream)
            return {shard: shards.tensor_file(stream, 0, entry.size)}

        return scan(self.artifact.url, entry, members)
