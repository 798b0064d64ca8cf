"""Modules with adapters: few operations a forward pass, none for an adapter that is off, merged weights, dropout.

The draws of the dropout are functions of sample and module, without a kept random generator. So a retry, other
micro-batches and the second forward pass of gradient checkpointing draw the same bits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from cosmos_rl_core import seeds
from cosmos_rl_core.parallel.sharding import WHOLE, Shards

DropoutKey = tuple[seeds.Key, ...]
"""Key of a sample's draws; the module's name is added to it."""

_LEVELS = 2**16
"""Number of levels of a draw. Draws have 16 bits, which takes a third of the time of a float, so the dropped share is a
multiple of 1 / 65536."""


class AdaptedLinear(Linear):
    """peft's module with adapters, whose results it has up to rounding, in fewer operations.

    An adapter is two matrix products here, the second one added to the base's result. peft also copies the input,
    scales and adds. A GPU often waits for its host to start operations.
    """

    is_off: bool
    """Whether the base computes alone."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the base's result plus what each active adapter adds: ``[..., in]`` to ``[..., out]``, in its type."""
        result = self.base_layer(x)
        if self.is_off or self.disable_adapters or self.merged:
            return result
        rows = result.reshape(-1, result.shape[-1])
        for name in self.active_adapters:
            if name in self.lora_A:
                a: Any = self.lora_A[name].weight
                b: Any = self.lora_B[name].weight
                rows = _plus(rows, functional.linear(self.lora_dropout[name](x), a), b, self.scaling[name])
        return rows.view(result.shape)


def _plus(rows: Tensor, low: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return ``rows + scale low b^T``, of ``rows`` ``[N, out]``, ``low`` ``[..., r]`` and ``b`` ``[out, r]``.

    Without gradients the result has the memory of ``rows``.
    """
    low = low.reshape(-1, low.shape[-1])
    if rows.dtype != low.dtype:
        # The base stays float32 where all else computes in a half type.
        return rows + (low @ b.T) * scale
    # Autocast would not cast for an operation in place.
    add = rows.addmm if torch.is_grad_enabled() else rows.addmm_
    return add(low, b.to(low.dtype).T, alpha=scale)


def adapt(model: nn.Module) -> list[AdaptedLinear]:
    """Make peft's modules with adapters :class:`AdaptedLinear`, and return them. Call it before FSDP."""
    found: list[Any] = [module for module in model.modules() if isinstance(module, Linear)]
    for module in found:
        module.__class__ = AdaptedLinear
        # Of each module itself from the start, since compiled code depends on where it is.
        module.is_off = False
    return found


@contextmanager
def base_alone(adapted: Sequence[AdaptedLinear]) -> Iterator[None]:
    """Let modules compute without their adapters, with the bits that adapters of zeros give."""
    for module in adapted:
        module.is_off = True
    try:
        yield
    finally:
        for module in adapted:
            module.is_off = False


@torch.no_grad()
def merge(adapted: Sequence[AdaptedLinear], shards: Shards = WHOLE) -> None:
    """Add all active adapters to the weights that they adapt, and turn them off for good.

    Results are the same up to rounding, and cost what the base's cost. For float32 weights: a half type would round
    small adapters away. An adapter of zeros changes no bit. Each rank changes its rows of a sharded weight.
    """
    for module in adapted:
        weight: Any = module.get_base_layer().weight
        is_cut = isinstance(weight, DTensor)
        # Not in place, unless the rows are its own: other modules share the memory of a kept base.
        merged = weight.to_local() if is_cut else weight.detach().clone()
        for name in filter(module.lora_A.__contains__, module.active_adapters):
            delta = module.get_delta_weight(name)
            first, count = shards.rows(len(delta)) if is_cut else (0, len(delta))
            merged += delta[first : first + count].to(merged.device)
        if not is_cut:
            weight.data = merged
        module.is_off = True


class KeyedDropout(nn.Module):
    """A module that sets a share ``p`` of its input to 0 and scales up the rest inside :func:`dropping`.

    Elsewhere it is the identity. Training mode has no effect: which samples drop what is decided by their keys.
    """

    def __init__(self, name: str, p: float) -> None:
        super().__init__()
        self.name = name
        self.dropped = round(p * _LEVELS)
        self.keys: tuple[DropoutKey, ...] = ()

    # The keys change with each call, and a compiler would make new code for each of them.
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the input ``[B m, ...]`` with dropped entries; ``m`` consecutive rows belong to one sample.

        Raises ``ValueError`` if the number of rows is not a multiple of the number of keys.
        """
        if not self.keys:
            return x
        rows, rest = divmod(x.shape[0], len(self.keys))
        if rest or not rows:
            raise ValueError(f"{self.name} got {x.shape[0]} rows, expected a multiple of {len(self.keys)} samples")
        dropped = np.concatenate([self._draw((rows, *x.shape[1:]), key) for key in self.keys])
        return x.masked_fill(torch.from_numpy(dropped).to(x.device), 0.0) * (_LEVELS / (_LEVELS - self.dropped))

    def _draw(self, shape: tuple[int, ...], key: DropoutKey) -> np.ndarray:
        generator = seeds.generator("lora dropout", *key, self.name)
        return generator.integers(0, _LEVELS, shape, dtype=np.uint16) < self.dropped


def dropouts_of(model: nn.Module) -> list[KeyedDropout]:
    """Return the dropout of every adapter in ``model``; empty without dropout. It walks through all modules."""
    return [module for module in model.modules() if isinstance(module, KeyedDropout)]


@contextmanager
def dropping(layers: Sequence[KeyedDropout], keys: Sequence[DropoutKey]) -> Iterator[None]:
    """Turn on the dropout of ``layers``, with one key for each sample of the batch; without keys, off.

    The ``with`` block must contain the backward pass, which repeats forwards under gradient checkpointing. May nest.
    """
    before = [layer.keys for layer in layers]
    try:
        for layer in layers:
            layer.keys = tuple(keys)
        yield
    finally:
        for layer, kept in zip(layers, before, strict=True):
            layer.keys = kept
