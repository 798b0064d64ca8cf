"""Steps of a :class:`Kernel` on tensors: the model's input, the mean of the next state, its log-probability.

The functions are pure. Rollouts (every sample at one step) and replays (each sample at its own step) use the same ones.
They call methods of tensors and never import torch, so that algorithms can use them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class Coefficients(NamedTuple):
    """Columns of a kernel's table, float64: ``[num_steps]``, or ``[B]`` after :meth:`at`."""

    t: Tensor
    input_scale: Tensor
    keep: Tensor
    push: Tensor
    recall: Tensor
    std: Tensor
    diffusion: Tensor
    """NaN for a step without one."""

    def at(self, index: Tensor) -> Coefficients:
        """Return the rows ``index``, ``[B]`` int64, one for each sample of a batch."""
        return Coefficients(*(column[index] for column in self))

    def each(self, change: Callable[[Tensor], Tensor]) -> Coefficients:
        """Return the coefficients with ``change`` applied to every column."""
        return Coefficients(*(change(column) for column in self))


def model_input(x: Tensor, at: Coefficients) -> tuple[Tensor, Tensor]:
    """Return the model's input for states ``x`` ``[B, ...]``: ``x_t``, the shape of ``x``, and t ``[B]``; float32."""
    return (_per_sample(at.input_scale, x) * x.double()).float(), at.t.float()


def clean(x: Tensor, velocity: Tensor, at: Coefficients) -> Tensor:
    """Return the estimate of x_0, ``input_scale x - t velocity``: float64, the shape of ``x`` ``[B, ...]``."""
    return _per_sample(at.input_scale, x) * x.double() - _per_sample(at.t, x) * velocity.double()


def mean(x: Tensor, velocity: Tensor, history: Tensor | None, at: Coefficients) -> Tensor:
    """Return the mean of the next state: float64, the shape of ``x`` ``[B, ...]``; gradients flow to the velocity.

    ``history`` is the previous estimate of x_0, finite (for example 0) also in samples that do not need it, or None if
    no sample needs it. The order of operations is fixed: equal float32 arguments give equal bits, in any batch, unless
    a compiler fuses them.
    """
    linear = _per_sample(at.keep, x) * x.double() + _per_sample(at.push, x) * velocity.double()
    return linear if history is None else linear + _per_sample(at.recall, x) * history.double()


def square_error(x_next: Tensor, mean: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean over generated dimensions of ``(x_next - mean)^2``: ``[B, ...]`` twice ``-> [B]`` float64."""
    return generated_mean((x_next.double() - mean) ** 2, mask)


def generated_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean over generated dimensions: ``[B, ...] -> [B]``; a mask makes it float64.

    ``mask`` broadcasts to ``values``: 1 at generated dimensions, 0 at given ones; None if all are generated. Given
    dimensions count neither in the sum nor in the number. Each sample needs a generated dimension.
    """
    if mask is None:
        return values.flatten(1).mean(1)
    return (values * mask.double()).flatten(1).sum(1) / num_generated(values, mask)


def num_generated(values: Tensor, mask: Tensor | None) -> Tensor | int:
    """Return the number of generated dimensions of each sample of ``values``: ``[B]`` float64, or an int for all."""
    return values[0].numel() if mask is None else mask.double().expand_as(values).flatten(1).sum(1)


def log_prob(square_error: Tensor, std: Tensor) -> Tensor:
    """Return the log-density of a transition: ``[B]`` twice ``-> [B]`` float64, nats a dimension.

    It equals ``Normal(mean, std).log_prob(x_next)`` averaged over each sample's dimensions. A deterministic step has no
    density: pass steps of ``Kernel.trainable`` only. This is not checked, because a check would wait for the device.
    Source: FlowGRPO, arXiv:2505.05470, the released code; the paper has the sum instead of the average.
    """
    std = std.double()
    return -square_error.double() / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)


def _per_sample(coefficient_B: Tensor, x: Tensor) -> Tensor:
    return coefficient_B.view(-1, *(1,) * (x.ndim - 1))
