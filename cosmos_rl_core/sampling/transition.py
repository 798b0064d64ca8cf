"""Steps of a :class:`Kernel` on tensors: what the model is fed, the mean of the next state, its log-probability.

Pure functions, the same ones for a rollout (every sample at one step) and for its replay (each sample at its own).
They use tensors by their methods and never import torch, so that algorithms can use them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
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
    """NaN where the step has none."""

    def at(self, index: Tensor) -> Coefficients:
        """The rows that ``index`` ``[B]`` int64 names, one for each sample of a batch."""
        return Coefficients(*(column[index] for column in self))


def model_input(x: Tensor, at: Coefficients) -> tuple[Tensor, Tensor]:
    """What the model is fed for the states ``x`` ``[B, ...]``: ``x_t``, the shape of ``x``, and t ``[B]``; float32."""
    return (_per_sample(at.input_scale, x) * x.double()).float(), at.t.float()


def clean(x: Tensor, velocity: Tensor, at: Coefficients) -> Tensor:
    """The estimate of x_0, ``input_scale x - t velocity``: float64, the shape of ``x`` ``[B, ...]``."""
    return _per_sample(at.input_scale, x) * x.double() - _per_sample(at.t, x) * velocity.double()


def mean(x: Tensor, velocity: Tensor, history: Tensor | None, at: Coefficients) -> Tensor:
    """The mean of the next state: float64, the shape of ``x`` ``[B, ...]``; gradients flow to the velocity.

    ``history`` is the previous estimate of x_0, finite (say 0) also in samples that do not need it, or None if none
    does. The order of the operations is fixed: equal float32 arguments give equal bits, in any batch, unless a
    compiler fuses them. Raises ``ValueError`` if a step needs the history and has none.
    """
    linear = _per_sample(at.keep, x) * x.double() + _per_sample(at.push, x) * velocity.double()
    if history is not None:
        return linear + _per_sample(at.recall, x) * history.double()
    if at.recall.any():
        raise ValueError("a step of second order needs the previous estimate of x_0, found None")
    return linear


def square_error(x_next: Tensor, mean: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean over the generated dimensions of ``(x_next - mean)^2``: ``[B, ...]`` twice ``-> [B]`` float64."""
    return generated_mean((x_next.double() - mean) ** 2, mask)


def generated_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the generated dimensions: ``[B, ...] -> [B]``; a mask makes it float64.

    ``mask`` broadcasts to ``values`` and is 1 where they were generated, 0 where they were given; only what was
    generated counts, above and below the fraction line. Each sample must have some of it. None where all are generated.
    """
    if mask is None:
        return values.flatten(1).mean(1)
    return (values * mask.double()).flatten(1).sum(1) / num_generated(values, mask)


def num_generated(values: Tensor, mask: Tensor | None) -> Tensor | int:
    """Generated dimensions of each sample of ``values`` ``[B, ...]``: ``[B]`` float64, or one number for all."""
    return values[0].numel() if mask is None else mask.double().expand_as(values).flatten(1).sum(1)


def log_prob(square_error: Tensor, std: Tensor) -> Tensor:
    """Log density of a transition, averaged over its dimensions: ``[B]`` twice ``-> [B]`` float64, nats a dimension.

    Equals ``Normal(mean, std).log_prob(x_next)`` averaged over each sample's dimensions.
    Raises ``ValueError`` if a step is deterministic: it has no density.
    Source: FlowGRPO, arXiv:2505.05470, the released code; the average, where the paper has the sum.
    """
    if not (std > 0).all():
        raise ValueError("a deterministic step has no log-probability; see Kernel.trainable for those that have one")
    std = std.double()
    return -square_error.double() / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)


def _per_sample(coefficient_B: Tensor, x: Tensor) -> Tensor:
    return coefficient_B.view(-1, *(1,) * (x.ndim - 1))
