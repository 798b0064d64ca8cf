"""The process group, small: what stages need of ``torch.distributed``, and one process without it.

It reads the environment, which few modules do: torchrun's rank and size.
"""

import datetime
import json
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.sharding import REPLICATE, SHARD


class Group:
    """Ranks that work together. With one process and no torchrun every collective is the identity.

    Raises :class:`ConfigError` unless ``shard_size``, how many ranks share one copy of the weights, divides them.
    """

    mesh: DeviceMesh | None = None
    """Copies of the weights, and ranks that share one; None where each rank has all weights."""

    def __init__(self, timeout_s: float, shard_size: int = 1, *, offload: bool = False, compiles: bool = False) -> None:
        self.offload, self.compiles = offload, compiles
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        if self.world_size > 1:
            timeout = datetime.timedelta(seconds=timeout_s)
            # One backend per device: objects and CPU tensors go over gloo, gradients over NCCL where there is CUDA.
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
        if self.world_size % shard_size:
            raise ConfigError(f"launch.dp_shard_size = {shard_size} does not divide {self.world_size} ranks")
        if shard_size > 1:
            replicas = self.world_size // shard_size
            mesh = init_device_mesh(self.device.type, (replicas, shard_size), mesh_dim_names=(REPLICATE, SHARD))
            self.mesh = mesh if replicas > 1 else mesh[SHARD]

    def all_reduce_sum_(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, value: Any) -> Any:
        """Rank 0's JSON value on every rank."""
        return self.gather(value if self.rank == 0 else None)[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order, on every rank. Travels as JSON, not as a pickle."""
        if self.world_size == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        cpu = torch.device("cpu")
        sizes = [torch.zeros(1, dtype=torch.int64, device=cpu) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64, device=cpu))
        longest = int(max(sizes))
        padded = torch.zeros(longest, dtype=torch.uint8, device=cpu)
        padded[: len(data)] = data
        parts = [torch.zeros(longest, dtype=torch.uint8, device=cpu) for _ in range(self.world_size)]
        dist.all_gather(parts, padded)
        return [json.loads(bytes(part[: int(size)].tolist())) for part, size in zip(parts, sizes, strict=True)]

    def close(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def is_collective(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone: the reason is in that rank's own words."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        word in text for word in ("gloo", "nccl", "connection reset by peer", "connection closed by peer")
    )
