"""A sampler as a table. The mean of every step is linear in the state, the velocity and the previous estimate of x_0.

``mean = keep x + push velocity + recall h``, with ``velocity = noise - x_0`` and h the estimate of x_0 made one step
earlier. Coefficients are float64 and computed once, so a rollout and its replay differ in nothing but the velocity.
States are flow states ``x_t = (1 - t) x_0 + t noise``, or EDM states ``x_0 + sigma noise`` with ``t = sigma / (1 +
sigma)``; ``input_scale`` makes the one what the model takes, the other it leaves alone.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cosmos_rl_core.errors import ConfigError


@dataclass(frozen=True)
class Step:
    """One step: what the model is fed, and the normal distribution of the next state given its answer."""

    index: int
    t: float
    """Noise level in [0, 1] that the model is fed."""
    input_scale: float
    """The model takes ``input_scale x``: 1 for a flow state, ``1 - t`` for an EDM state."""
    keep: float
    """Coefficient of the state in the mean."""
    push: float
    """Coefficient of the velocity."""
    recall: float = 0.0
    """Coefficient of the previous estimate of x_0; 0 where none is needed."""
    std: float = 0.0
    """Standard deviation of the next state, in units of the state; 0 is a deterministic step."""
    diffusion: float | None = None
    """FlowGRPO's sigma_d: ``std`` without the factor ``sqrt(-dt)``. None for a sampler that has no such split."""


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

    def at(self, index: Tensor) -> "Coefficients":
        """The rows that ``index`` ``[B]`` int64 names, one for each sample of a batch."""
        return Coefficients(*(column[index] for column in self))


@dataclass(frozen=True)
class Kernel:
    """A sampler: how a rollout starts, and its steps in their order; the last one ends at x_0."""

    steps: tuple[Step, ...]
    sigmas: tuple[float, ...]
    """The grid it was made from, to be recorded: noise levels in [0, 1] of a flow, sigmas of EDM."""
    start_std: float = 1.0
    """The rollout starts at ``start_std`` times standard normal noise."""
    start_churn_std: float = 0.0
    """Deviation of the further noise added at the start: EDM's churn of the first level."""

    @property
    def trainable(self) -> tuple[int, ...]:
        """Indices of the steps with a density: those that are not deterministic."""
        return tuple(step.index for step in self.steps if step.std > 0)

    def check_trainable(self, indices: Iterable[int]) -> None:
        """Raise :class:`ConfigError` naming every index that is no step, is deterministic or comes twice."""
        problems = []
        for index, count in sorted(Counter(indices).items()):
            if not 0 <= index < len(self.steps):
                problems.append(f"{index} (there are {len(self.steps)} steps, from 0)")
            elif index not in self.trainable:
                problems.append(f"{index} (deterministic)")
            if count > 1:
                problems.append(f"{index} (given {count} times)")
        if problems:
            allowed = ", ".join(map(str, self.trainable)) or "none, this sampler adds no noise"
            raise ConfigError(f"steps that cannot be trained on: {', '.join(problems)}; those that can: {allowed}")

    def table(self, device: torch.device) -> Coefficients:
        """All steps as float64 tensors ``[num_steps]`` on ``device``."""
        columns = [[getattr(step, name) for step in self.steps] for name in Coefficients._fields]
        numbers = [[math.nan if value is None else value for value in column] for column in columns]
        return Coefficients(*(torch.tensor(column, dtype=torch.float64, device=device) for column in numbers))


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
    """Mean over the dimensions of ``(x_next - mean)^2``: ``[B, ...]`` twice ``-> [B]`` float64.

    ``mask`` broadcasts to ``x_next`` and is 1 where it was generated, 0 where it was given; only what was generated
    counts, above and below the fraction line. Each sample must have some of it.
    """
    squares = (x_next.double() - mean) ** 2
    if mask is None:
        return squares.flatten(1).mean(1)
    weights = mask.double().expand_as(squares)
    return (squares * weights).flatten(1).sum(1) / weights.flatten(1).sum(1)


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
