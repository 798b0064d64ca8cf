"""Dropout of adapters whose every draw is a function of the sample and the module, never of a generator that lives.

A retry, another cut into micro-batches and the second forward pass of gradient checkpointing draw the same bits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from cosmos_rl_core import seeds

DropoutKey = tuple[seeds.Key, ...]
"""All that one sample's draws depend on, besides the module."""

_LEVELS = 2**16
"""Draws are 16 bits, a third of the time of a float: the share that is left out is a multiple of 1 / 65536."""


class KeyedDropout(nn.Module):
    """Sets a share ``p`` of its input to 0 and scales up the rest, inside :func:`dropping`; else the identity.

    Whether the module is in training mode is nothing to it: the stock models stay in evaluation mode.
    """

    def __init__(self, name: str, p: float) -> None:
        super().__init__()
        self.name = name
        self.dropped = round(p * _LEVELS)
        self.keys: tuple[DropoutKey, ...] = ()

    # A compiler would make code for the keys it sees, and these are others each time.
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """``[B m, ...]``, of which ``m`` rows in a row are of one sample, to the same."""
        if not self.keys:
            return x
        rows, rest = divmod(x.shape[0], len(self.keys))
        if rest or not rows:
            raise ValueError(f"{self.name} is given {x.shape[0]} rows, no multiple of {len(self.keys)} samples")
        dropped = np.concatenate([self._draw((rows, *x.shape[1:]), key) for key in self.keys])
        return x.masked_fill(torch.from_numpy(dropped).to(x.device), 0.0) * (_LEVELS / (_LEVELS - self.dropped))

    def _draw(self, shape: tuple[int, ...], key: DropoutKey) -> np.ndarray:
        generator = seeds.generator("lora dropout", *key, self.name)
        return generator.integers(0, _LEVELS, shape, dtype=np.uint16) < self.dropped


@contextmanager
def dropping(model: nn.Module, keys: Sequence[DropoutKey]) -> Iterator[None]:
    """Let the adapters of ``model`` drop out, by a key a sample of the batch; with none, not at all.

    Keep it up until the backward pass is done, which repeats forwards under gradient checkpointing. May nest.
    """
    layers = [module for module in model.modules() if isinstance(module, KeyedDropout)]
    before = [layer.keys for layer in layers]
    try:
        for layer in layers:
            layer.keys = tuple(keys)
        yield
    finally:
        for layer, kept in zip(layers, before, strict=True):
            layer.keys = kept
