"""A transformer's weights spread over ranks, by FSDP2: rows of each matrix are cut, everything else is on all ranks.

What autocast computes with in a half type are the weights of linear and convolution modules. Those are cut, and
gathered block by block in the type that they are computed with. Biases, norms, tables and adapters, less than a
hundredth of a model, stay whole and float32: so a forward pass gives the same bits as on one rank. A policy then
consists of named float32 tensors of which some are this rank's rows alone; :class:`Shards` knows which.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from cosmos_rl_core.parallel.precision import MATRICES, float32_modules
from cosmos_rl_core.weights.base_weights import BaseWeights

REPLICATE, SHARD = "dp_replicate", "dp_shard"
"""Names of the dimensions of the mesh: copies of the weights, and the ranks that share one."""


@dataclass(frozen=True)
class Shards:
    """Which of the named tensors are cut by rows, and where; without a mesh, none."""

    mesh: DeviceMesh | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Whole shapes of the tensors that are cut."""

    @property
    def index(self) -> int:
        """Which of the cuts this rank holds."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(SHARD)

    def cuts(self, name: str) -> bool:
        """Whether a rank has only some rows of that tensor."""
        return name in self.shapes

    def rows(self, length: int) -> tuple[int, int]:
        """First row and number of rows of this rank's cut of a tensor of ``length`` rows; the last cuts may be short,
        or empty."""
        each = -(-length // (1 if self.mesh is None else self.mesh[SHARD].size()))
        first = min(self.index * each, length)
        return first, min(each, length - first)

    def shape(self, name: str, local: Tensor) -> tuple[int, ...]:
        """The whole shape of a tensor of which this rank has ``local``."""
        return self.shapes.get(name, tuple(local.shape))

    def local(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor: a view of it."""
        if self.mesh is None or not self.cuts(name):
            return whole
        first, count = self.rows(whole.shape[0])
        return whole[first : first + count]

    def whole(self, name: str, local: Tensor) -> Tensor:
        """The whole tensor, from all ranks: each calls this at the same time, or where nothing is cut, at any."""
        if self.mesh is None or not self.cuts(name):
            return local
        shape = torch.Size(self.shapes[name])
        stride = torch.empty(shape, device="meta").stride()
        placements: list[Placement] = [Shard(0)] if self.mesh.ndim == 1 else [Replicate(), Shard(0)]
        there = local.to(self.mesh.device_type)
        found = DTensor.from_local(there, self.mesh, placements, run_check=False, shape=shape, stride=stride)
        return found.full_tensor()

    def norms(self, names: Sequence[str], here: Tensor) -> Tensor:
        """2-norms of whole tensors, ``[len(names)]``, from those of what this rank has; each rank calls this."""
        if self.mesh is None:
            return here
        cut = torch.tensor([self.cuts(name) for name in names], device=here.device)
        squares = torch.where(cut, here.square(), 0.0).to(self.mesh.device_type)
        dist.all_reduce(squares, group=self.mesh.get_group(SHARD))
        return torch.where(cut, squares.to(here.device).sqrt(), here)


WHOLE = Shards()
"""Nothing is cut: every rank has all."""


def shard(transformer: nn.Module, mesh: DeviceMesh, compute: torch.dtype | None, *, offload: bool = False) -> Shards:
    """Cut the matrices of ``transformer`` over the mesh, block by block and the root.

    They are gathered as ``compute`` (None: as they are), those of modules that stay float32 as they are; their
    gradients come as sums over all ranks, in float32. With ``offload`` they rest in the CPU's memory. Call it after
    adapters were added; ``transformer`` may be on the meta device.
    """
    names, parameters = matrix_names(transformer), dict(transformer.named_parameters())
    shapes = {_base_name(name): tuple(p.shape) for name, p in parameters.items() if name in names}
    whole = {p for name, p in parameters.items() if name not in names}
    kept = float32_modules(transformer)
    rest = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    for module in [*kept, *blocks(transformer), transformer]:
        dtype = None if module in kept else compute
        # Reshard the root too: other parts of a policy pass through these modules, and none may find the last one's.
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=True,
            mp_policy=MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False),
            offload_policy=rest,
            ignored_params=whole,
        )
    for module in transformer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo has no sum that divides.
            module.set_force_sum_reduction_for_comms(True)
    return Shards(mesh, shapes)


def blocks(transformer: nn.Module) -> list[nn.Module]:
    """The transformer's repeated blocks, as its class names them."""
    names = getattr(transformer, "_no_split_modules", None) or []
    return [module for module in transformer.modules() if type(module).__name__ in names]


COMPILED_VERSIONS = 64
"""Versions of a block's code: its kinds, times with and without gradient, times batch sizes and numbers of tokens."""


def compile_blocks(transformer: nn.Module, backend: str = "inductor") -> None:
    """Compile the repeated blocks one by one: as they are equal, the first one's code serves all of them.

    A block that needs more than :data:`COMPILED_VERSIONS` raises, where PyTorch would run it uncompiled from then on,
    with other rounding.
    """
    limits = torch._dynamo.config
    limits.recompile_limit = COMPILED_VERSIONS
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, 8 * COMPILED_VERSIONS)
    limits.fail_on_recompile_limit_hit = True
    for block in blocks(transformer):
        block.compile(backend=backend)


@torch.no_grad()
def materialise(transformer: nn.Module, device: torch.device, *, offload: bool = False) -> None:
    """Give weights of the meta device memory, with anything in it where they are cut, else 0; move the others.

    With ``offload`` what is cut gets the CPU's memory, and everything else ``device``'s.
    """
    # Detached, since the parameters themselves are given other memory.
    real = {name: t.detach() for name, t in _tensors(transformer).items() if not t.is_meta}
    transformer.to_empty(device="cpu" if offload else device)
    for name, tensor in _tensors(transformer).items():
        if not isinstance(tensor, DTensor):
            tensor.data = real[name].to(device) if name in real else torch.zeros_like(tensor, device=device)


@torch.no_grad()
def load_base(transformer: nn.Module, pipeline: str, shards: Shards) -> None:
    """Fill weights and buffers from a pipeline directory; of what is cut, only this rank's rows are read.

    Raises :class:`ArtifactError` if it has no tensor of a weight's name and shape.
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
    """A weight's name in the base model's files: without peft's wrapper."""
    return name.replace(".base_layer.", ".")


def matrix_names(transformer: nn.Module) -> set[str]:
    """Names of the weights that autocast computes with in a half type."""
    return {
        f"{name}.weight"
        for name, module in transformer.named_modules()
        if isinstance(module, MATRICES) and ".lora_" not in name
    }
