"""One part of a policy, each tensor read on access with every byte checked."""

from collections.abc import Iterator, Mapping
from functools import partial

from torch import Tensor

from cosmos_rl_core.storage.shards import TensorPiece, tensor_file
from cosmos_rl_core.storage.tensor_files import decode
from stages.artifacts.artifact import Artifact
from stages.artifacts.files import read_pieces, scan
from stages.artifacts.request import Input


class PartTensors(Mapping[str, Tensor]):
    """Tensors by name, on the CPU; none of them is kept.

    Each of the part's files is read once, a block at a time, and checked; from then on each tensor is checked by
    itself.
    """

    def __init__(self, source: Input, part: str) -> None:
        self._artifact = Artifact(source)
        self._pieces: dict[str, tuple[str, TensorPiece]] = {}
        for file in self._artifact.names(f"{part}/"):
            entry = self._artifact.entry(file)
            found = scan(source.url, entry, partial(tensor_file, start=0, size=entry.size))
            self._pieces |= {name: (file, piece) for name, piece in found.tensors.items()}

    def __getitem__(self, name: str) -> Tensor:
        file, piece = self._pieces[name]
        data = read_pieces(self._artifact.url, self._artifact.entry(file), name, (piece,))
        return decode(data, piece.dtype, piece.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)
