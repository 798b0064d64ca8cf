"""Dropout for adapters whose draws are functions of sample and module, without a kept random generator.

So a retry, other micro-batches and the second forward pass of gradient checkpointing draw the same bits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from cosmos_rl_core import seeds

DropoutKey = tuple[seeds.Key, ...]
"""Key of a sample's draws; the module's name is added to it."""

_LEVELS = 2**16
"""Number of levels of a draw. Draws have 16 bits, which takes a third of the time of a float, so the dropped share is a
multiple of 1 / 65536."""


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
