"""What rollouts stored of their samples for training, each tensor read when it is asked for, every byte checked."""

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage.tensor_files import decode
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Input
from stages.formats.members import KEPT_BYTES, Members
from stages.formats.samples import INDEX, read_table, shard_name


class SampleTensors(Mapping[str, Mapping[str, Tensor]]):
    """Tensors by sample id and name, unbatched, on the CPU.

    A rank reads those of its own micro-batches alone. At most ``kept_bytes`` of each rollout stay in memory. Raises
    :class:`ArtifactError` at once if one of ``sample_ids`` is in no rollout.
    """

    def __init__(self, rollouts: Collection[Input], sample_ids: Collection[str], kept_bytes: int = KEPT_BYTES) -> None:
        self._places: dict[str, tuple[Members, str]] = {}
        for artifact in map(Artifact, rollouts):
            members, index = Members(artifact, kept_bytes), read_table(artifact, INDEX)
            shard_of = dict(zip(index["sample_id"], index["shard"], strict=True))
            self._places |= {i: (members, shard_name(shard_of[i])) for i in sample_ids if i in shard_of}
        if missing := sorted(set(sample_ids) - self._places.keys()):
            raise ArtifactError(f"the rollouts hold no tensors of {len(missing)} samples, e.g. {missing[0]}")

    def about(self, sample_id: str) -> dict[str, Any]:
        """The facts of a sample: prompt, seeds, noise levels."""
        members, shard = self._places[sample_id]
        return json.loads(members.read(shard, f"{sample_id}.json"))

    def __getitem__(self, sample_id: str) -> Mapping[str, Tensor]:
        return _Tensors(*self._places[sample_id], f"{sample_id}.safetensors")

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class _Tensors(Mapping[str, Tensor]):
    """Those of one safetensors member."""

    def __init__(self, members: Members, shard: str, name: str) -> None:
        self._place = (shard, name)
        self._members, self._pieces = members, members.tensors(shard, name)

    def __getitem__(self, tensor: str) -> Tensor:
        piece = self._pieces[tensor]
        return decode(self._members.read_tensor(*self._place, tensor), piece.dtype, piece.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)
