"""Members of an artifact's tar shards, and their tensors, each read on access with every byte checked."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import shards
from cosmos_rl_core.storage.shards import Member, Piece, TensorPiece
from cosmos_rl_core.storage.tensor_headers import Readable
from stages.artifacts.artifact import Artifact
from stages.artifacts.files import read_pieces, scan
from stages.execution.context import Context, Ranks, told_by_all

KEPT_BYTES = 2**28
"""Most bytes of the latest reads that are kept in memory, by default."""


class Kept:
    """The data of the latest reads, at most ``most_bytes`` together. Threads may share it."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._size = most_bytes, 0
        self._data: OrderedDict[Hashable, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, read: Callable[[], bytes]) -> bytes:
        """Return the data that is kept under a key; if there is none, call ``read`` and keep its data."""
        data = self._data.get(key)
        if data is None:
            data = read()
        with self._lock:
            self._size += len(data) - len(self._data.pop(key, b""))
            self._data[key] = data
            while self._size > self._most_bytes:
                _, oldest = self._data.popitem(last=False)
                self._size -= len(oldest)
        return data


class Members:
    """The members of an artifact's shards. A lone safetensors file counts as a shard whose only member has its name.

    A manifest only has the digest of a whole shard. The first access to a shard therefore reads all of it, a block at a
    time, checks it, and notes place and digest of each member and tensor. Later reads fetch single members or tensors,
    and check those digests. At most ``kept_bytes`` stay in memory. Threads may share it.
    """

    def __init__(self, artifact: Artifact, kept_bytes: int = KEPT_BYTES) -> None:
        self.artifact = artifact
        self._tables: dict[str, dict[str, Member]] = {}
        self._kept, self._scanning = Kept(kept_bytes), threading.Lock()

    def read(self, shard: str, name: str, tensor: TensorPiece | None = None) -> bytes:
        """Read the bytes of one member, or only of one of its tensors.

        Raises :class:`ArtifactError` if it is missing or differs from what was committed.
        """
        pieces: tuple[Piece, ...] = (tensor,) if tensor else self._member(shard, name).pieces
        entry = self.artifact.entry(shard)
        key = (shard, pieces[0].start, pieces[-1].end)
        return self._kept.get(key, lambda: read_pieces(self.artifact.url, entry, name, pieces))

    def tensors(self, shard: str, name: str) -> dict[str, TensorPiece]:
        """Return the types and shapes of a safetensors member's tensors, by name. Raises like :meth:`read`."""
        return self._member(shard, name).tensors

    def names(self, shard: str) -> list[str]:
        """Return the names of a shard's members. Raises like :meth:`read`."""
        return [*self._table(shard)]

    def scan_together(self, names: Iterable[str], context: Context[Ranks]) -> None:
        """Read shards for the first time, each on one rank, and tell all ranks their members. Collective.

        Each rank hashes only its share of the bytes. Raises :class:`ArtifactError` on all ranks if one finds damage.
        """
        ranks, every = context.ranks, sorted({*names})
        if ranks.world_size == 1:
            return
        mine = every[ranks.rank :: ranks.world_size]

        def scanned() -> dict[str, dict[str, list[Any]]]:
            found: dict[str, dict[str, list[Any]]] = {}
            for number, shard in enumerate(mine):
                context.progress("reading samples", number, len(mine))
                found[shard] = {name: [*map(_row, one.pieces)] for name, one in self._scan(shard).items()}
            return found

        for told in told_by_all(ranks, scanned):
            for shard, members in told.items():
                self._tables[shard] = {name: Member(tuple(map(_piece, rows))) for name, rows in members.items()}

    def _member(self, shard: str, name: str) -> Member:
        table = self._table(shard)
        if name not in table:
            raise ArtifactError(f"{shard} of {self.artifact.url} has no member {name!r}; it has {len(table)} others")
        return table[name]

    def _table(self, shard: str) -> dict[str, Member]:
        if shard not in self._tables:
            # One shard at a time: the blocks of one are already read in parallel.
            with self._scanning:
                if shard not in self._tables:
                    self._tables[shard] = self._scan(shard)
        return self._tables[shard]

    def _scan(self, shard: str) -> dict[str, Member]:
        entry = self.artifact.entry(shard)

        def members(stream: Readable) -> dict[str, Member]:
            if shard.endswith(".tar"):
                return shards.members(stream)
            return {shard: shards.tensor_file(stream, 0, entry.size)}

        return scan(self.artifact.url, entry, members)


def _row(piece: Piece) -> list[Any]:
    """Return the fields of a piece for JSON."""
    named = [piece.name, piece.dtype, [*piece.shape]] if isinstance(piece, TensorPiece) else []
    return [piece.start, piece.end, piece.sha256, *named]


def _piece(row: list[Any]) -> Piece:
    """Return the piece that a :func:`_row` describes."""
    start, end, digest, *named = row
    return TensorPiece(start, end, digest, named[0], named[1], tuple(named[2])) if named else Piece(start, end, digest)
