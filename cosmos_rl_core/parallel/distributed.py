"""The process group of a stage: the few collectives that stages need, also for one process without torchrun.

The ranks come from torchrun's environment variables. Ranks without torchrun meet at the file that ``MEETING`` names,
or, with several nodes, at the address that rank 0 writes into it.
"""

import datetime
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

from cosmos_rl_core.canonical import differences, require_exchangeable
from cosmos_rl_core.config.parallelism import ALONE, Device, Parallelism
from cosmos_rl_core.errors import ConfigError, CosmosRLError
from cosmos_rl_core.numerics import numerics
from cosmos_rl_core.parallel.devices import settled
from cosmos_rl_core.parallel.sharding import REPLICATE, SHARD
from cosmos_rl_core.processes import HOST, MEETING

_SENT_BYTES = 2**26
"""Largest number of bytes that are sent at once."""
_LOOK_S = 0.05
"""Interval in seconds at which a rank looks for the address of rank 0."""


class Group:
    """The ranks of a stage. With one process and no torchrun every collective is the identity.

    Ranks that share the tokens of a video are peers; the first of them leads. Peers get the same work, so work is
    divided by ``data_rank`` among ``data_world_size``. Sharding of weights is independent of this: its mesh spans all
    ranks.
    """

    mesh: DeviceMesh | None = None
    """Mesh of replicas and shards of the weights; None if each rank has all weights."""

    peers: dist.ProcessGroup | None = None
    """Process group of this rank and its peers; None without context parallelism."""

    def __init__(self, timeout_s: float, parallelism: Parallelism = ALONE, device: Device | None = None) -> None:
        """Join the other ranks, and compute on a ``device`` as :func:`settled` says.

        Raises :class:`ConfigError` if this rank cannot compute there, or if one rank's numerics differ from rank 0's.
        """
        self.parallelism = parallelism
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size, self.data_world_size = parallelism.world_size, parallelism.data_world_size
        cp_size = parallelism.cp_size
        self.device = settled(device, int(os.environ.get("LOCAL_RANK", "0")))
        cuda = self.device.type == "cuda"
        self.data_rank, self.leads = self.rank // cp_size, self.rank % cp_size == 0
        if cuda:
            torch.cuda.set_device(self.device)
        timeout = datetime.timedelta(seconds=timeout_s)
        if self.world_size > 1:
            # Objects and CPU tensors use gloo, CUDA tensors use NCCL. A rank without CUDA joins by gloo as well, so
            # that the comparison of numerics below can name it.
            meeting, host = os.environ.get(MEETING), os.environ.get(HOST)
            method = "env://" if meeting is None else f"file://{meeting}"
            store = None if meeting is None or host is None else self._met_at(Path(meeting), host, timeout)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "cpu:gloo",
                init_method=method if store is None else None,
                store=store,
                timeout=timeout,
                world_size=self.world_size,
                rank=self.rank,
            )
        self.numerics = numerics(torch)
        """Numerics of this rank, equal on all ranks."""
        # Compared before any use of NCCL, which would hang between different devices until its timeout.
        ranks = self.gather([os.uname().nodename, self.numerics])
        require_alike(ranks)
        self.here = [rank for rank, (host, _) in enumerate(ranks) if host == ranks[self.rank][0]]
        """The ranks on this machine, in order."""
        if parallelism.dp_shard_size > 1:
            shape = parallelism.dp_replicate_size, parallelism.dp_shard_size
            mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=(REPLICATE, SHARD))
            self.mesh = mesh if shape[0] > 1 else mesh[SHARD]
        if cp_size > 1:
            peers, _ = dist.new_subgroups(cp_size, timeout=timeout)
            assert isinstance(peers, dist.ProcessGroup)
            self.peers = peers

    def _met_at(self, meeting: Path, host: str, timeout: datetime.timedelta) -> dist.Store:
        """Return the store of ranks on several nodes: rank 0 opens it on a free port, and writes the address to a file.

        Raises ``TimeoutError`` if no address comes in time.
        """
        if self.rank == 0:
            store = dist.TCPStore(host, 0, self.world_size, is_master=True, timeout=timeout, wait_for_workers=False)
            temporary = meeting.with_suffix(".tmp")
            temporary.write_text(f"{host}:{store.port}", encoding="utf-8")
            temporary.replace(meeting)
            return store
        deadline_s = time.monotonic() + timeout.total_seconds()
        while not meeting.exists():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"rank 0 on {host} did not say where the ranks meet")
            time.sleep(_LOOK_S)
        host, _, port = meeting.read_text(encoding="utf-8").rpartition(":")
        return dist.TCPStore(host, int(port), self.world_size, is_master=False, timeout=timeout)

    def all_reduce_sum_(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks in place, and return it."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's JSON value on every rank.

        It is not gathered: every rank would get as many buffers of its size as there are ranks, and layouts name every
        sample. Raises like :meth:`gather`.
        """
        if self.rank == 0:
            require_exchangeable(value)
        if self.world_size == 1:
            return value
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8) if self.rank == 0 else None
        size = torch.tensor(0 if data is None else len(data), device="cpu")
        dist.broadcast(size, 0)
        sent = torch.empty(int(size), dtype=torch.uint8, device="cpu") if data is None else data
        dist.broadcast(sent, 0)
        # Rank 0 may leave once this returns, and the others must have everything by then.
        _gather_tensors(size, None)
        return json.loads(sent.numpy().tobytes())

    def gather(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks, in rank order, on every rank.

        Raises ``TypeError``, also with one rank, for a value that JSON would change (:func:`require_exchangeable`).
        """
        if self.world_size > 1:
            return _gather(value, None)
        require_exchangeable(value)
        return [value]

    def blocks_of(self, owner: int, data: bytes, size: int) -> Iterator[memoryview]:
        """Yield, on all ranks, the ``size`` bytes of the rank ``owner``'s ``data``, in order, in blocks.

        The ``data`` of other ranks is not read. Collective: every rank must take all blocks.
        """
        for first in range(0, size, _SENT_BYTES):
            block = torch.empty(min(_SENT_BYTES, size - first), dtype=torch.uint8, device="cpu")
            if self.rank == owner:
                block.numpy()[:] = memoryview(data)[first : first + len(block)]
            if self.world_size > 1:
                there = block.to(self.device)
                dist.broadcast(there, owner)
                block = there.cpu()
            yield block.numpy().data

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Gather JSON values in rank order over ``group``, None for all ranks. Values are sent as JSON, never pickled."""
    require_exchangeable(value)
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [int(size) for size in _gather_tensors(torch.tensor(len(data), device="cpu"), group)]
    parts = _gather_tensors(functional.pad(data, (0, max(sizes) - len(data))), group)
    return [json.loads(part[:size].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]


def _gather_tensors(tensor: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Gather tensors of one shape in rank order."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, tensor, group)
    return found


def require_alike(ranks: list[tuple[str, dict[str, Any]]]) -> None:
    """Raise :class:`ConfigError` unless all ranks, each given by host and numerics, have the numerics of rank 0.

    Otherwise the bits of an artifact, and of every sum over ranks, would depend on the assignment of work to ranks.
    """
    (first_host, first), *others = ranks
    unlike = [
        f"rank {rank} ({found['device']} on {host}) differs from rank 0 ({first['device']} on {first_host}): "
        + ", ".join(differences(first, found))
        for rank, (host, found) in enumerate(others, start=1)
        if found != first
    ]
    if unlike:
        raise ConfigError(
            f"the ranks of one stage must have equal devices and numerics; {'; '.join(unlike)}. Give the stage nodes "
            "of one kind, e.g. by launch.ray.accelerator_type or launch.slurm.options"
        )


_LOST_RANK = (
    r"(?:Process group |NCCL )?[Ww]atchdog (?:thread terminated|caught collective operation)\b",
    r"NCCL (?:error(?:: | in: )|communicator (?:was|is) |(?:operation|timeout)\b)",
    r"nccl(?:Remote|System|Internal|UnhandledCuda)Error\b",
    r"Some NCCL operations have failed or timed out\b",
    r"Detected mismatch between collectives on ranks\b",
    r"Ranks? \d[\d, ]* (?:failed to pass|successfully reached|timed out in) monitoredBarrier\b",
    r"No ranks successfully processed in monitoredBarrier\b",
    r"Timed out initializing process group in store based barrier\b",
    r"The client socket has (?:timed out|failed to connect)\b",
)
"""Texts at the beginning of a line or of a quoted message."""
_LOST_RANK_IN_LINES = (
    # gloo's errors begin with the place in its source.
    r"^\[(?:enforce fail at )?[^\]\n]*\bgloo/[^\]\n]*\.(?:cc|cpp|h):\d+\]",
    r"^[Gg]loo \w+ failed\b",
    # PyTorch reports the system's text unchanged, while errors of services begin with the service's name.
    r"\A[Cc]onnection (?:reset|closed|refused) by peer\b",
)
_COLLECTIVE = re.compile(
    "|".join([*(rf"(?:^|(?<=[:\]] )){text}" for text in _LOST_RANK), *_LOST_RANK_IN_LINES]), re.MULTILINE
)
"""Texts of errors that report the loss of another rank; paths that contain these words do not match."""


def is_collective(error: BaseException) -> bool:
    """Return whether an error only reports that another rank ended, so that the reason is in that rank's error."""
    reported = isinstance(error, RuntimeError) and _COLLECTIVE.search(str(error)) is not None
    if reported or isinstance(error, dist.DistError):
        return True
    cause = None if isinstance(error, CosmosRLError) else error.__cause__
    return cause is not None and is_collective(cause)
