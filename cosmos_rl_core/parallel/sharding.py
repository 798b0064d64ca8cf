"""Sharding of a transformer's weights over ranks by FSDP2: each rank has some rows of each matrix.

The matrices are the weights of linear and convolution modules, which autocast casts to a half type. They are gathered
block by block in the type of the computation. Biases, norms, tables and adapters, less than a hundredth of a model,
stay whole and float32 on all ranks. So a forward pass gives the same bits as on one rank. Some of a policy's named
float32 tensors are then only this rank's rows; :class:`Shards` lists them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from cosmos_rl_core.parallel.precision import MATRICES, float32_modules
from cosmos_rl_core.pipelines.base_weights import BaseWeights

REPLICATE, SHARD = "dp_replicate", "dp_shard"
"""Names of the mesh's dimensions: copies of the weights, and ranks that share one copy."""


@dataclass(frozen=True)
class Shards:
    """The named tensors that are sharded by rows, and their mesh; without a mesh there are none."""

    mesh: DeviceMesh | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Whole shapes of the sharded tensors."""

    @property
    def index(self) -> int:
        """Return the index of this rank's shard."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(SHARD)

    def cuts(self, name: str) -> bool:
        """Return whether the tensor is sharded."""
        return name in self.shapes

    def rows(self, length: int) -> tuple[int, int]:
        """Return first row and number of rows of this rank's shard of a tensor with ``length`` rows.

        The last shards may be short or empty.
        """
        each = -(-length // (1 if self.mesh is None else self.mesh[SHARD].size()))
        first = min(self.index * each, length)
        return first, min(each, length - first)

    def shape(self, name: str, local: Tensor) -> tuple[int, ...]:
        """Return the whole shape of a tensor; ``local`` is this rank's part of it."""
        return self.shapes.get(name, tuple(local.shape))

    def local(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's rows of a whole tensor ``[rows, ...]``, as a view of it."""
        if self.mesh is None or not self.cuts(name):
            return whole
        first, count = self.rows(whole.shape[0])
        return whole[first : first + count]

    def whole(self, name: str, local: Tensor) -> Tensor:
        """Gather the whole tensor ``[rows, ...]`` from all ranks' rows.

        Collective if the tensor is sharded: all ranks must call it together.
        """
        if self.mesh is None or not self.cuts(name):
            return local
        shape = torch.Size(self.shapes[name])
        stride = torch.empty(shape, device="meta").stride()
        placements: list[Placement] = [Shard(0)] if self.mesh.ndim == 1 else [Replicate(), Shard(0)]
        there = local.to(self.mesh.device_type)
        found = DTensor.from_local(there, self.mesh, placements, run_check=False, shape=shape, stride=stride)
        return found.full_tensor()

    def norms(self, names: Sequence[str], here: Tensor) -> Tensor:
        """Return the 2-norms of whole tensors, ``[len(names)]``, given the norms of this rank's rows. Collective."""
        if self.mesh is None:
            return here
        cut = torch.tensor([self.cuts(name) for name in names], device=here.device)
        squares = torch.where(cut, here.square(), 0.0).to(self.mesh.device_type)
        dist.all_reduce(squares, group=self.mesh.get_group(SHARD))
        return torch.where(cut, squares.to(here.device).sqrt(), here)


WHOLE = Shards()
"""Shards without a mesh: no tensor is sharded."""


def shard(transformer: nn.Module, mesh: DeviceMesh, compute: torch.dtype | None, *, offload: bool = False) -> Shards:
    """Shard the matrices of ``transformer`` over the mesh, block by block and the rest with the root.

    Matrices are gathered in the type ``compute`` (None: unchanged); modules that stay float32 are gathered unchanged.
    Frozen matrices may have that type already (:mod:`cosmos_rl_core.weights.half_weights`).
    Gradients are float32 sums over all ranks. With ``offload`` the shards stay in CPU memory. Add adapters before;
    ``transformer`` may be on the meta device.
    """
    names, parameters = matrix_names(transformer), dict(transformer.named_parameters())
    shapes = {_base_name(name): tuple(p.shape) for name, p in parameters.items() if name in names}
    whole = {p for name, p in parameters.items() if name not in names}
    kept = float32_modules(transformer)
    rest = fsdp.CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else fsdp.OffloadPolicy()
    for module in [*kept, *blocks(transformer), transformer]:
        dtype = None if module in kept else compute
        # The root is resharded too, so that no gathered weights remain when another part of the policy runs.
        fsdp.fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=True,
            mp_policy=fsdp.MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False),
            offload_policy=rest,
            ignored_params=whole,
        )
    for module in transformer.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo has no reduction that divides by the number of ranks.
            module.set_force_sum_reduction_for_comms(True)
    return Shards(mesh, shapes)


def blocks(transformer: nn.Module) -> list[nn.Module]:
    """Return the transformer's repeated blocks, by the class names in its ``_no_split_modules``."""
    names = getattr(transformer, "_no_split_modules", None) or []
    return [module for module in transformer.modules() if type(module).__name__ in names]


@torch.no_grad()
def materialise(transformer: nn.Module, device: torch.device, *, offload: bool = False) -> None:
    """Allocate memory for weights on the meta device, and move all others to ``device``.

    New memory is zero, or uninitialised for sharded weights. With ``offload`` sharded weights get CPU memory.
    """
    # Detached, because to_empty replaces the memory of the parameters themselves.
    real = {name: t.detach() for name, t in _tensors(transformer).items() if not t.is_meta}
    transformer.to_empty(device="cpu" if offload else device)
    for name, tensor in _tensors(transformer).items():
        if not isinstance(tensor, DTensor):
            tensor.data = real[name].to(device) if name in real else torch.zeros_like(tensor, device=device)


@torch.no_grad()
def load_base(transformer: nn.Module, pipeline: str, shards: Shards) -> None:
    """Load weights and buffers from a pipeline directory; only this rank's rows of sharded weights are read.

    Raises :class:`ArtifactError` if the directory lacks a weight or has it in another shape.
    """
    live = _tensors(transformer)
    names = {_base_name(name): name for name in transformer.state_dict() if ".lora_" not in name}
    base = BaseWeights(pipeline, {key: tuple(live[name].shape) for key, name in names.items()})
    for key, name in names.items():
        tensor = live[name]
        if isinstance(tensor, DTensor):
            tensor.to_local().copy_(base.rows(key, *shards.rows(tensor.shape[0])))
        else:
            tensor.copy_(base[key])


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _base_name(name: str) -> str:
    """Return a weight's name in the base model's files, without peft's wrapper."""
    return name.replace(".base_layer.", ".")


def matrix_names(transformer: nn.Module) -> set[str]:
    """Return the names of the weights that autocast casts to a half type."""
    return {
        f"{name}.weight"
        for name, module in transformer.named_modules()
        if isinstance(module, MATRICES) and ".lora_" not in name
    }
