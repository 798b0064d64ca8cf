"""The trainable weights of a transformer, and the named copies of them that form a policy.

LoRA and full fine-tuning are handled alike, by a set of trainable parameters. A **part** (``current``, ``old``,
``ema``, ``reference``) has one tensor for each parameter. The optimizer moves ``current``; other parts are swapped in
for a forward pass and out again. Tensors have the names of the module tree without peft's adapter name.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import peft
import torch
from safetensors import torch as safetensors_torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cosmos_rl_core import seeds
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.parallel.sharding import WHOLE, Shards
from cosmos_rl_core.storage.tensor_files import check_tensors
from cosmos_rl_core.weights import lora as adapters
from cosmos_rl_core.weights.lora_dropout import KeyedDropout
from cosmos_rl_core.weights.parts import CURRENT, REFERENCE

ADAPTER = "default"
"""Name of the adapter in peft; files do not contain it."""

MAX_FILE_BYTES = 2**30
"""Largest sum of a file's tensors, in bytes; a larger tensor has a file of its own."""


class PolicyWeights:
    """The parts of a policy on one transformer; :func:`prepare` makes it.

    Of a sharded tensor this rank has only its rows: in ``parameters``, in every part and in the optimizer.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], shards: Shards = WHOLE) -> None:
        self.shards = shards
        self._cut = {name: p for name, p in sorted(parameters.items()) if isinstance(p, DTensor)}
        self.parameters = {name: _local(parameters[name]) for name in sorted(parameters)}
        """The trainable parameters by name, sorted, for the optimizer."""
        self._parts: dict[str, dict[str, Tensor]] = {}
        self._in_use: str | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the names of the existing parts, ``current`` first."""
        return (CURRENT, *self._parts)

    @contextmanager
    def use(self, part: str) -> Iterator[None]:
        """Make the transformer run with the weights of ``part``; only ``current`` has gradients. Cannot nest.

        Raises ``ValueError`` if the part does not exist, ``RuntimeError`` inside another ``use``.
        """
        tensors = self.here(part)
        live = self.here(CURRENT)
        self._in_use = part
        try:
            if part == CURRENT:
                yield
            else:
                self._point_at(tensors)
                self._swap_cut(tensors)
                with torch.no_grad():
                    yield
        finally:
            self._point_at(live)
            if part != CURRENT:
                self._swap_cut(tensors)
            self._in_use = None

    def create(self, part: str, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Add or replace a part by a copy of ``tensors``, of ``current`` if None.

        Raises :class:`ArtifactError` on other names, shapes or types.
        """
        source = self.here(CURRENT) if tensors is None else self._checked(tensors)
        self._parts[part] = {
            name: source[name].detach().to(parameter.device, copy=True) for name, parameter in self.parameters.items()
        }

    def share(self, part: str, other: str) -> None:
        """Make ``part`` an alias of ``other`` until one of them is created anew; neither may be ``current``."""
        self._parts[part] = self.here(other)

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        """Copy ``tensors`` into an existing part. Raises :class:`ArtifactError` on other names, shapes or types."""
        own = self.here(part)
        for name, tensor in self._checked(tensors).items():
            own[name].copy_(tensor)

    @torch.no_grad()
    def lerp_(self, part: str, decay: float) -> None:
        """Move a part towards ``current``: ``part <- decay * part + (1 - decay) * current``."""
        for name, tensor in self.here(part).items():
            tensor.mul_(decay).add_(self.parameters[name].data, alpha=1 - decay)

    def here(self, part: str) -> dict[str, Tensor]:
        """Return the part's own tensors on this rank, sorted by name. Do not write to them."""
        if self._in_use is not None:
            raise RuntimeError(f"the part {self._in_use!r} is in use; leave its `with` block first")
        if part == CURRENT:
            return {name: parameter.data for name, parameter in self.parameters.items()}
        if part not in self._parts:
            raise ValueError(f"this policy has no part {part!r}; it has: {', '.join(self.parts)}")
        return self._parts[part]

    def collect_gradients(self) -> None:
        """Move the gradients of sharded tensors, already summed over all ranks, to ``parameters``."""
        for name, parameter in self._cut.items():
            gradient = parameter.grad
            self.parameters[name].grad = gradient.to_local() if isinstance(gradient, DTensor) else None
            parameter.grad = None

    def _point_at(self, tensors: Mapping[str, Tensor]) -> None:
        # Autocast caches casts by the identity of a parameter, which stays the same when its data changes.
        torch.clear_autocast_cache()
        for name, parameter in self.parameters.items():
            if name not in self._cut:
                parameter.data = tensors[name]

    @torch.no_grad()
    def _swap_cut(self, tensors: Mapping[str, Tensor]) -> None:
        # FSDP gathers from its own memory, so its contents and those of the part change places.
        gathers_on_gpu = self.shards.mesh is not None and self.shards.mesh.device_type == "cuda"
        if gathers_on_gpu and any(self.parameters[name].is_cpu for name in self._cut):
            # A GPU may still read the rows in CPU memory, which are overwritten next.
            torch.cuda.synchronize()
        for name in self._cut:
            here, there = self.parameters[name].data, tensors[name]
            before = here.to(there.device, copy=True)
            here.copy_(there)
            there.copy_(before)

    def _checked(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return check_tensors(tensors, self.parameters, "weights of this model")


def prepare(
    transformer: nn.Module,
    lora: LoraConfig | None,
    *,
    reference: bool = True,
    shard: Callable[[nn.Module], Shards] = lambda _: WHOLE,
) -> PolicyWeights:
    """Make ``transformer`` trainable, still equal to the base model, and add a ``reference`` part if wanted.

    With LoRA the base is frozen and all adapter tensors are zero (load :func:`initial_lora` or a policy next). The
    reference is zero as well, so it equals the base exactly. In full fine-tuning every parameter trains, and the
    reference is a copy of the present weights. ``shard`` may shard the weights after the choice of trainable ones.
    """
    if lora is None:
        transformer.requires_grad_(True)
    else:
        add_lora(transformer, lora)
    shards = shard(transformer)
    weights = PolicyWeights({_plain(name): p for name, p in transformer.named_parameters() if p.requires_grad}, shards)
    if reference:
        weights.create(REFERENCE)
    return weights


def add_lora(transformer: nn.Module, config: LoraConfig) -> None:
    """Add an adapter of zeros and freeze all other weights.

    Raises like :func:`cosmos_rl_core.weights.lora.adapted`.
    """
    modules = dict(transformer.named_modules())
    linear = {name: tuple(module.weight.shape) for name, module in modules.items() if isinstance(module, nn.Linear)}
    adapted = adapters.adapted(config, linear, modules.keys() - linear.keys())
    transformer.requires_grad_(False)
    # peft draws weights, which are zeroed below; the fork keeps the state of the global generator.
    with torch.random.fork_rng(devices=[]):
        transformer.add_adapter(  # pyright: ignore[reportCallIssue]
            peft.LoraConfig(**adapters.peft_settings(config, adapters.targets(config, linear))),  # pyright: ignore[reportArgumentType]
            adapter_name=ADAPTER,
        )
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_(_is_lora(name))
        if _is_lora(name):
            nn.init.zeros_(parameter)
    if config.lora_dropout:
        for name in adapted:
            layer: Any = transformer.get_submodule(name)
            layer.lora_dropout[ADAPTER] = KeyedDropout(name, config.lora_dropout)


def initial_lora(shapes: Mapping[str, tuple[int, ...]], config: LoraConfig, seed: int) -> dict[str, Tensor]:
    """Return initial adapter tensors, float32 on the CPU: A drawn from (seed, name, shape), B zero."""
    return {name: _initial_tensor(name, tuple(shapes[name]), config, seed) for name in sorted(shapes)}


def cut(sizes: Mapping[str, int], max_bytes: int = MAX_FILE_BYTES) -> list[list[str]]:
    """Divide tensors, given by their bytes, into files of at most ``max_bytes``, in the order of their names.

    Returns the names in each file. The result depends only on names and sizes.
    """
    files: list[list[str]] = []
    room = 0
    for name in sorted(sizes):
        if not files or sizes[name] > room:
            files.append([])
            room = max_bytes
        files[-1].append(name)
        room -= sizes[name]
    return files


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Encode tensors in the safetensors format without metadata; equal tensors give equal bytes."""
    return safetensors_torch.save({name: tensors[name].contiguous() for name in sorted(tensors)})


def _initial_tensor(name: str, shape: tuple[int, ...], config: LoraConfig, seed: int) -> Tensor:
    if ".lora_A." not in name:
        return torch.zeros(shape, dtype=torch.float32, device="cpu")
    if config.init_lora_weights == "gaussian":
        return torch.from_numpy(seeds.normal(shape, seed, "lora", name)) / shape[0]
    # Kaiming-uniform with a = sqrt(5) has the bound sqrt(6 / (1 + a^2) / fan_in) = 1 / sqrt(fan_in).
    uniform = torch.from_numpy(seeds.generator(seed, "lora", name).random(shape, dtype="float32"))
    return (2 * uniform - 1) / math.sqrt(math.prod(shape[1:]))


def _local(parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter, or for a sharded one a parameter that shares the memory of this rank's rows."""
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(parameter.to_local().detach(), requires_grad=True)


def _is_lora(name: str) -> bool:
    return f".{ADAPTER}." in name and (".lora_A." in name or ".lora_B." in name)


def _plain(name: str) -> str:
    return name.replace(f".{ADAPTER}.", ".") if _is_lora(name) else name
