"""How much arithmetic a measured piece of work is, and how much of the device's peak that took: MFU.

A forward pass is 2 x weights x tokens operations in each linear layer and convolution, and 4 x tokens^2 x width in each
attention, as torch's FlopCounterMode counts them on a forward pass of the true shapes without weights. Training is 3
forward passes where weights are trained in full, and 2 with LoRA, whose frozen weights need no gradients of their own.
Passes repeated by gradient checkpointing are no work in this sense.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from cosmos_rl_core.parallel.precision import ParamDtype
from tests.benchmarks.models import Shape

META = torch.device("meta")
FORWARDS_OF_TRAINING = 2
"""Passes of training of adapters on frozen weights: the pass itself and the gradients of its activations."""

_A100, _HOPPER = 312e12, 989e12
PEAK_FLOPS: dict[tuple[str, ParamDtype], float] = {
    ("NVIDIA A100-SXM4-40GB", "bfloat16"): _A100,
    ("NVIDIA A100-SXM4-80GB", "bfloat16"): _A100,
    ("NVIDIA A100 80GB PCIe", "bfloat16"): _A100,
    ("NVIDIA H100 80GB HBM3", "bfloat16"): _HOPPER,
    ("NVIDIA H200", "bfloat16"): _HOPPER,
}
"""By the device's whole name, since variants and slices of a chip have other peaks: NVIDIA's data sheets, dense."""


def peak_flops(device_name: str, dtype: ParamDtype) -> float | None:
    """Operations a second at most; None for a device that is not listed, of which no MFU is told."""
    return PEAK_FLOPS.get((device_name, dtype))


def forward_flops(shape: Shape) -> int:
    """Return the operations of one forward pass of the transformer on one sample."""
    model = shape.empty_model(META)
    model.transformer.to(META)
    x_t = torch.empty(1, *model.latent_shape(shape.size, shape.frames), device=META)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.velocity(x_t, torch.empty(1, device=META), shape.condition(META, 1))
    return counter.get_total_flops()


@dataclass
class Passes:
    """Samples that went through a transformer."""

    without_gradient: int = 0
    trained: int = 0

    @property
    def in_forwards(self) -> int:
        """Forward passes of one sample that cost as much."""
        return self.without_gradient + FORWARDS_OF_TRAINING * self.trained


@contextmanager
def counted(transformer: nn.Module) -> Iterator[Passes]:
    """How many samples go through it."""
    passes = Passes()

    def count(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        rows = len(named["hidden_states"])
        if torch.is_grad_enabled():
            passes.trained += rows
        else:
            passes.without_gradient += rows

    hook = transformer.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield passes
    finally:
        hook.remove()
