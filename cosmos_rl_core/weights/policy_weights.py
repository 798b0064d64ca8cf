"""The trainable weights of a transformer and the named copies of them that a policy is made of.

LoRA and full fine-tuning are one thing here: a set of trainable parameters. A **part** (``current``, ``old``, ``ema``,
``reference``) is one tensor for each of them. ``current`` is what the optimizer moves; any other part is swapped in for
a forward pass and out again. Names are those of the module tree without peft's adapter name.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import peft
import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors_torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cosmos_rl_core import seeds
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.parallel.sharding import WHOLE, Shards
from cosmos_rl_core.storage.tensor_files import check_tensors
from cosmos_rl_core.weights import lora as adapters
from cosmos_rl_core.weights.lora_dropout import KeyedDropout
from cosmos_rl_core.weights.parts import CURRENT, REFERENCE

ADAPTER = "default"
"""peft's name of the one adapter; in no file."""

MAX_FILE_BYTES = 2**30
"""Tensors of one file sum to at most this, unless a single tensor is larger."""


class PolicyWeights:
    """The parts of a policy on one transformer. Make it with :func:`prepare`.

    Where ``shards`` cuts a tensor, this rank has its rows alone: in ``parameters``, in every part, in the optimizer.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], shards: Shards = WHOLE) -> None:
        self.shards = shards
        self._cut = {name: p for name, p in sorted(parameters.items()) if isinstance(p, DTensor)}
        self._parameters = {name: _local(parameters[name]) for name in sorted(parameters)}
        self._parts: dict[str, dict[str, Tensor]] = {}
        self._in_use: str | None = None

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name, sorted; give these to the optimizer."""
        return dict(self._parameters)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts there are, ``current`` first."""
        return (CURRENT, *self._parts)

    @contextmanager
    def use(self, part: str) -> Iterator[None]:
        """Run the transformer with the weights of ``part``, without gradients unless it is ``current``. Cannot nest."""
        self._check_not_in_use()
        tensors = self._tensors(part)
        live = self._tensors(CURRENT)
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
        """Add a part, a copy of ``tensors`` or else of ``current``, replacing one of that name."""
        self._check_not_in_use()
        if part == CURRENT:
            raise ValueError("`current` is the live weights; use load()")
        source = self._tensors(CURRENT) if tensors is None else self._checked(tensors)
        self._parts[part] = {
            name: source[name].detach().to(parameter.device, copy=True) for name, parameter in self._parameters.items()
        }

    def share(self, part: str, other: str) -> None:
        """Let ``part`` be ``other`` by a second name, until one of them is created anew; neither is ``current``."""
        self._check_not_in_use()
        if CURRENT in (part, other):
            raise ValueError("`current` is the live weights; a part that is to stay as they are is made by create()")
        self._parts[part] = self._tensors(other)

    def here(self, part: str) -> dict[str, Tensor]:
        """The part's own tensors as this rank has them, sorted by name: not to be written to."""
        self._check_not_in_use()
        return self._tensors(part)

    def get(self, part: str) -> dict[str, Tensor]:
        """Copies of the part's tensors, on the CPU and contiguous, sorted by name."""
        self._check_not_in_use()
        return {
            name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, tensor in self._tensors(part).items()
        }

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        """Copy ``tensors`` into an existing part. Raises :class:`ArtifactError` on other names, shapes or types."""
        self._check_not_in_use()
        for name, tensor in self._checked(tensors).items():
            self._tensors(part)[name].copy_(tensor)

    @torch.no_grad()
    def lerp_(self, part: str, decay: float) -> None:
        """``part <- decay * part + (1 - decay) * current``."""
        self._check_not_in_use()
        if part in (CURRENT, REFERENCE):
            raise ValueError(f"{part!r} is not an average")
        for name, tensor in self._tensors(part).items():
            tensor.mul_(decay).add_(self._parameters[name].data, alpha=1 - decay)

    def _tensors(self, part: str) -> dict[str, Tensor]:
        if part == CURRENT:
            return {name: parameter.data for name, parameter in self._parameters.items()}
        if part not in self._parts:
            raise ValueError(f"this policy has no part {part!r}; it has: {', '.join(self.parts)}")
        return self._parts[part]

    def collect_gradients(self) -> None:
        """Hand the gradients of cut tensors, which are sums over all ranks already, to ``parameters``."""
        for name, parameter in self._cut.items():
            gradient = parameter.grad
            self._parameters[name].grad = gradient.to_local() if isinstance(gradient, DTensor) else None
            parameter.grad = None

    def _point_at(self, tensors: Mapping[str, Tensor]) -> None:
        # Autocast keeps casts of parameters by their identity, which stays when their data is another part's.
        torch.clear_autocast_cache()
        for name, parameter in self._parameters.items():
            if name not in self._cut:
                parameter.data = tensors[name]

    @torch.no_grad()
    def _swap_cut(self, tensors: Mapping[str, Tensor]) -> None:
        # FSDP gathers from its own memory: what is there changes places with the part.
        self._wait_for_gathers()
        for name in self._cut:
            here, there = self._parameters[name].data, tensors[name]
            before = here.to(there.device, copy=True)
            here.copy_(there)
            there.copy_(before)

    def _wait_for_gathers(self) -> None:
        """A GPU may still be about to read rows that rest on the CPU, which are written to at once."""
        gathers_on_gpu = self.shards.mesh is not None and self.shards.mesh.device_type == "cuda"
        if gathers_on_gpu and any(self._parameters[name].is_cpu for name in self._cut):
            torch.cuda.synchronize()

    def _check_not_in_use(self) -> None:
        if self._in_use is not None:
            raise RuntimeError(f"the part {self._in_use!r} is in use; leave its `with` block first")

    def _checked(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return check_tensors(tensors, self._parameters, "weights of this model")


def prepare(
    transformer: nn.Module,
    lora: LoraConfig | None,
    *,
    reference: bool = True,
    spread: Callable[[nn.Module], Shards] = lambda _: WHOLE,
) -> PolicyWeights:
    """Make ``transformer`` trainable as configured and still equal to the base model, with a reference if wanted.

    LoRA: base frozen, all adapter tensors zero (load :func:`initial_lora` or a policy next), a reference of zeros: its
    delta is exactly 0. Full fine-tuning: every parameter trains, and the reference is a copy of the weights as now.
    ``spread`` may cut the weights over ranks once it is settled which of them train.
    """
    if lora is None:
        transformer.requires_grad_(True)
    else:
        add_lora(transformer, lora)
    shards = spread(transformer)
    weights = PolicyWeights({_plain(name): p for name, p in transformer.named_parameters() if p.requires_grad}, shards)
    if reference:
        weights.create(REFERENCE)
    return weights


def add_lora(transformer: nn.Module, config: LoraConfig) -> None:
    """Add the adapter, all zeros, and freeze everything else.

    Raises :class:`ConfigError` on an unknown target module, or a pattern of modules that says nothing or two things.
    """
    modules = dict(transformer.named_modules())
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    targets = adapters.targets(config, linear)
    named = {target: {name for name in modules if f".{name}".endswith(f".{target}")} for target in targets}
    if unknown := [target for target, names in named.items() if names.isdisjoint(linear)]:
        known = ", ".join(sorted({_suffix(name) for name in linear}))
        raise ConfigError(f"no linear module is named {', '.join(unknown)} (lora.target_modules); known: {known}")
    adapted = set().union(*named.values())
    if others := sorted(adapted - set(linear)):
        raise ConfigError(f"lora.target_modules also name modules that are not linear: {', '.join(others[:5])}")
    adapters.check_patterns(config, adapted)
    transformer.requires_grad_(False)
    # peft draws the weights that are zeroed below: the fork leaves the global generator as it was.
    with torch.random.fork_rng(devices=[]):
        transformer.add_adapter(  # pyright: ignore[reportCallIssue]
            peft.LoraConfig(**adapters.peft_settings(config, targets)),  # pyright: ignore[reportArgumentType]
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
    """Fresh adapter tensors, a function of (seed, name, shape): A drawn as configured, B zero, float32 on the CPU."""
    return {name: _initial_tensor(name, tuple(shapes[name]), config, seed) for name in sorted(shapes)}


def cut(sizes: Mapping[str, int], max_bytes: int = MAX_FILE_BYTES) -> list[list[str]]:
    """Names of the tensors of each file, in order, each filled up to ``max_bytes``: a function of names and bytes."""
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
    """One safetensors file without metadata: equal tensors, equal bytes."""
    return safetensors_torch.save({name: tensors[name].contiguous() for name in sorted(tensors)})


def from_bytes(content: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU. Raises :class:`ArtifactError` if it is not one."""
    try:
        return safetensors_torch.load(content)
    except SafetensorError as error:
        raise ArtifactError(f"not a safetensors file ({len(content)} bytes): {error}") from error


def _initial_tensor(name: str, shape: tuple[int, ...], config: LoraConfig, seed: int) -> Tensor:
    if ".lora_A." not in name:
        return torch.zeros(shape, dtype=torch.float32, device="cpu")
    if config.init_lora_weights == "gaussian":
        return torch.from_numpy(seeds.normal(shape, seed, "lora", name)) / shape[0]
    # Kaiming-uniform with a = sqrt(5) has the bound sqrt(6 / (1 + a^2) / fan_in) = 1 / sqrt(fan_in).
    uniform = torch.from_numpy(seeds.generator(seed, "lora", name).random(shape, dtype="float32"))
    return (2 * uniform - 1) / math.sqrt(math.prod(shape[1:]))


def _suffix(name: str) -> str:
    """The last word of a module's name, with the one before it where the last is a number."""
    *_, before, last = ("", *name.split("."))
    return f"{before}.{last}" if last.isdigit() and before else last


def _local(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself, or one on the memory of this rank's rows."""
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(parameter.to_local().detach(), requires_grad=True)


def _is_lora(name: str) -> bool:
    return f".{ADAPTER}." in name and (".lora_A." in name or ".lora_B." in name)


def _plain(name: str) -> str:
    return name.replace(f".{ADAPTER}.", ".") if _is_lora(name) else name
