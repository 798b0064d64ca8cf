"""The trainable weights of a transformer, and the named copies of them that form a policy.

LoRA and full fine-tuning are handled alike, by a set of trainable parameters. A **part** (``current``, ``old``,
``ema``, ``reference``) has one tensor for each parameter. The optimizer moves ``current``; other parts are swapped in
for a forward pass and out again. Tensors have the names of the module tree without peft's adapter name.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from cosmos_rl_core.weights.lora_layers import AdaptedLinear, KeyedDropout, adapt, base_alone, merge
from cosmos_rl_core.weights.parts import CURRENT, REFERENCE

ADAPTER = "default"
"""Name of the adapter in peft; files do not contain it."""

BELOW = "init"
"""Name in peft of a frozen adapter below it."""

OTHER = "other"
"""Name in peft of an adapter of another shape in its place."""


class PolicyWeights:
    """The parts of a policy on one transformer; :func:`prepare` makes it.

    This rank has only its rows of a sharded tensor: in ``parameters``, in every part and in the optimizer. A frozen
    adapter ``below``, if there is one, adds to the base under every part that is not bare. An adapter ``other`` has the
    parts that :meth:`create_other` makes, and is zero under all other parts. ``adapted`` are the modules with adapters.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        shards: Shards = WHOLE,
        below: Mapping[str, nn.Parameter] | None = None,
        other: Mapping[str, nn.Parameter] | None = None,
        adapted: Sequence[AdaptedLinear] = (),
    ) -> None:
        self.shards = shards
        self.below = dict(below or {})
        """The tensors of the frozen adapter by name: zero until :meth:`load_below`."""
        self.other = dict(other or {})
        """The tensors of the other adapter by name: zero while none of its parts is in use."""
        self._others: dict[str, dict[str, Tensor]] = {}
        self._bare: set[str] = set()
        self._adapted = adapted
        self._unadapted: set[str] = set()
        """Parts under which the transformer is the base."""
        self._cut = {name: p for name, p in sorted(parameters.items()) if isinstance(p, DTensor)}
        self.parameters = {name: _local(parameters[name]) for name in sorted(parameters)}
        """The trainable parameters by name, sorted, for the optimizer."""
        self._parts: dict[str, dict[str, Tensor]] = {}
        self._in_use: str | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the names of the existing parts, ``current`` first."""
        return (CURRENT, *self._parts, *self._others)

    @contextmanager
    def use(self, part: str) -> Iterator[None]:
        """Make the transformer run with the weights of ``part``; only ``current`` has gradients. Cannot nest.

        Raises ``ValueError`` if the part does not exist, ``RuntimeError`` inside another ``use``.
        """
        tensors = self.here(CURRENT) if part in self._others else self.here(part)
        self._in_use = part
        # Autocast caches casts by the identity of a parameter, which stays the same when its data changes.
        torch.clear_autocast_cache()
        try:
            with self._swapped(part, tensors), torch.set_grad_enabled(part == CURRENT and torch.is_grad_enabled()):
                yield
        finally:
            torch.clear_autocast_cache()
            self._in_use = None

    def create(self, part: str, tensors: Mapping[str, Tensor] | None = None, *, bare: bool = False) -> None:
        """Add or replace a part by a copy of ``tensors``, of ``current`` if None; with ``bare`` the frozen adapter is
        off while it is in use.

        Raises :class:`ArtifactError` on other names, shapes or types.
        """
        (self._bare.add if bare else self._bare.discard)(part)
        self._unadapted.discard(part)
        source = self.here(CURRENT) if tensors is None else self._checked(tensors)
        self._parts[part] = {
            name: source[name].detach().to(parameter.device, copy=True) for name, parameter in self.parameters.items()
        }

    def create_other(self, part: str, tensors: Mapping[str, Tensor], *, bare: bool = False) -> None:
        """Add a part of the other adapter, under which the trained one is off, as :meth:`create` does."""
        (self._bare.add if bare else self._bare.discard)(part)
        self._unadapted.discard(part)
        checked = check_tensors(tensors, self.other, "an adapter of another shape")
        self._others[part] = {
            name: checked[name].detach().to(parameter.device, copy=True) for name, parameter in self.other.items()
        }

    def create_reference(self) -> None:
        """Add the part ``reference``, equal to the base: ``current`` as it is before anything is loaded.

        It takes no time for adapters, which would add nothing.
        """
        self.create(REFERENCE, bare=bool(self.below))
        if self._adapted:
            self._unadapted.add(REFERENCE)

    def remove(self, part: str) -> None:
        """Remove a part, and free its memory unless another part shares it. Unknown ones are ignored."""
        self._unadapted.discard(part)
        for parts in (self._parts, self._others):
            parts.pop(part, None)

    def share(self, part: str, other: str) -> None:
        """Make ``part`` an alias of ``other`` until one of them is created anew; neither may be ``current``."""
        if other in self._others:
            self._others[part] = self._others[other]
        else:
            self._parts[part] = self.here(other)
        for some in (self._bare, self._unadapted):
            (some.add if other in some else some.discard)(part)

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        """Copy ``tensors`` into an existing part. Raises :class:`ArtifactError` on other names, shapes or types."""
        own = self._changing(part)
        for name, tensor in self._checked(tensors).items():
            own[name].copy_(tensor)

    def merge(self) -> None:
        """Add the adapters to the base for good (:func:`cosmos_rl_core.weights.lora_layers.merge`).

        ``current`` then is what the transformer computes with outside of :meth:`use`, which raises from now on.
        """
        merge(self._adapted, self.shards)
        self._in_use = f"{CURRENT}, merged"

    def load_below(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy ``tensors`` into the frozen adapter. Raises :class:`ArtifactError` on other names, shapes or types."""
        check_tensors(tensors, self.below, "a frozen adapter of this model")
        for name, parameter in self.below.items():
            parameter.data.copy_(tensors[name])

    @torch.no_grad()
    def lerp_(self, part: str, decay: float) -> None:
        """Move a part towards ``current``: ``part <- decay * part + (1 - decay) * current``."""
        for name, tensor in self._changing(part).items():
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

    def _changing(self, part: str) -> dict[str, Tensor]:
        """Return a part's tensors to write to. What shares them is no longer the base either."""
        tensors = self.here(part)
        self._unadapted -= {name for name in self._unadapted if self._parts[name] is tensors}
        return tensors

    @contextmanager
    def _swapped(self, part: str, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Give the transformer the weights of a part. Under another adapter the trained one keeps its ``tensors``."""
        if part == CURRENT:
            yield
            return
        if part in self._unadapted:
            with base_alone(self._adapted):
                yield
            return
        live, other = {name: parameter.data for name, parameter in self.parameters.items()}, self._others.get(part, {})
        off = _outputs(self.below) if part in self._bare else {}
        off |= _outputs(self.parameters) if other else {}
        zeros = {parameter: parameter.data for parameter in self.other.values()} if other else {}
        try:
            for parameter in off:
                parameter.data = torch.zeros_like(parameter)
            for name in other:
                self.other[name].data = other[name]
            if not other:
                self._point_at(tensors)
                self._swap_cut(tensors)
            yield
        finally:
            for parameter, data in (off | zeros).items():
                parameter.data = data
            if not other:
                self._point_at(live)
                self._swap_cut(tensors)

    def _point_at(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            if name not in self._cut:
                parameter.data = tensors[name]

    @torch.no_grad()
    def _swap_cut(self, tensors: Mapping[str, Tensor]) -> None:
        # FSDP gathers from its own memory, so its memory and the part's exchange contents.
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
    below: LoraConfig | None = None,
    other: LoraConfig | None = None,
    reference: bool = True,
    shard: Callable[[nn.Module], Shards] = lambda _: WHOLE,
    trains: Callable[[str], bool] = lambda _: True,
) -> PolicyWeights:
    """Make ``transformer`` trainable, still equal to the base model, and add a ``reference`` part if wanted.

    With LoRA the base is frozen and all adapter tensors are zero (load :func:`initial_lora` or a policy next). The
    reference is zero as well, so it equals the base exactly. In full fine-tuning every parameter trains, and the
    reference is a copy of the present weights. ``shard`` may shard the weights after the choice of trainable ones.
    With ``below`` the adapter lies on a frozen one with these settings, which is off under the reference. ``other`` are
    the settings of an adapter that replaces it under some parts. In full fine-tuning ``trains`` says by the name which
    parameters train.
    """
    adapted: list[AdaptedLinear] = []
    if lora is None:
        for name, parameter in transformer.named_parameters():
            parameter.requires_grad_(trains(name))
    else:
        adapted = add_lora(transformer, lora, below, other)
    shards = shard(transformer)
    every = dict(transformer.named_parameters())
    frozen, replacing = ({_plain(name): p for name, p in every.items() if _is_lora(name, a)} for a in (BELOW, OTHER))
    trained = {_plain(name): p for name, p in every.items() if p.requires_grad}
    weights = PolicyWeights(trained, shards, frozen, replacing, adapted)
    if reference:
        weights.create_reference()
    return weights


def add_lora(
    transformer: nn.Module, config: LoraConfig, below: LoraConfig | None = None, other: LoraConfig | None = None
) -> list[AdaptedLinear]:
    """Add an adapter of zeros, and frozen ones of zeros for ``below`` and ``other``; freeze all other weights.

    Returns the modules that have any. Raises like :func:`cosmos_rl_core.weights.lora.adapted`.
    """
    modules = dict(transformer.named_modules())
    linear = {name: tuple(module.weight.shape) for name, module in modules.items() if isinstance(module, nn.Linear)}
    # The output of the frozen adapter is added first, so that it is the same bits with and without the other.
    settings = ({} if below is None else {BELOW: below}) | {ADAPTER: config}
    settings |= {} if other is None else {OTHER: other}
    adapted = {name: adapters.adapted(own, linear, modules.keys() - linear.keys()) for name, own in settings.items()}
    transformer.requires_grad_(False)
    for adapter, own in settings.items():
        # peft draws weights, which are zeroed below; the fork keeps the state of the global generator.
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")
            transformer.add_adapter(  # pyright: ignore[reportCallIssue]
                peft.LoraConfig(**adapters.peft_settings(own, adapters.targets(own, linear))),  # pyright: ignore[reportArgumentType]
                adapter_name=adapter,
            )
    if len(settings) > 1:
        transformer.set_adapter([*settings])  # pyright: ignore[reportCallIssue]
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_(_is_lora(name))
        if any(_is_lora(name, adapter) for adapter in settings):
            # peft gives it the type of the weight that it adapts, which may rest in a half type.
            parameter.data = torch.zeros_like(parameter, dtype=torch.float32)
    if config.lora_dropout:
        for name in adapted[ADAPTER]:
            layer: Any = transformer.get_submodule(name)
            layer.lora_dropout[ADAPTER] = KeyedDropout(name, config.lora_dropout)
    return adapt(transformer)


def initial_lora(shapes: Mapping[str, tuple[int, ...]], config: LoraConfig, seed: int) -> dict[str, Tensor]:
    """Return initial adapter tensors, float32 on the CPU: A drawn from (seed, name, shape), B zero."""
    return {name: _initial_tensor(name, tuple(shapes[name]), config, seed) for name in sorted(shapes)}


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


def _outputs(adapter: Mapping[str, nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Return the factors B of an adapter, with their data: zeros in their place turn it off."""
    return {p: p.data for name, p in adapter.items() if ".lora_B." in name}


def _local(parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter, or for a sharded one a parameter that shares the memory of this rank's rows."""
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(parameter.to_local().detach(), requires_grad=True)


def _is_lora(name: str, adapter: str = ADAPTER) -> bool:
    return name.endswith((f".lora_A.{adapter}.weight", f".lora_B.{adapter}.weight"))


def _plain(name: str) -> str:
    adapter = next((adapter for adapter in (ADAPTER, BELOW, OTHER) if _is_lora(name, adapter)), None)
    return name if adapter is None else f"{name.removesuffix(f'.{adapter}.weight')}.weight"
