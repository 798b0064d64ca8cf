"""A sampler as a table: the mean of every step is linear in the state, the velocity and earlier estimates of x_0.

``mean = keep x + push velocity + recall h``, with ``velocity = noise - x_0`` and h the estimate of x_0 of the step
before. A deterministic step may add older estimates. Coefficients are float64 and computed once, so that a rollout and
its replay differ in the velocity alone.
States are flow states ``x_t = (1 - t) x_0 + t noise``, or EDM states ``x_0 + sigma noise`` with ``t = sigma / (1 +
sigma)``. The model takes flow states: ``input_scale`` turns EDM states into them.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One step: the model's input, and the normal distribution of the next state given the model's output."""

    index: int
    t: float
    """Noise level in [0, 1], an input of the model."""
    keep: float
    """Coefficient of the state in the mean."""
    push: float
    """Coefficient of the velocity."""
    input_scale: float = 1.0
    """The model's input is ``input_scale x``: 1 for a flow state, ``1 - t`` for an EDM state."""
    recall: float = 0.0
    """Coefficient of the previous estimate of x_0; 0 if the step does not use it."""
    recall_older: tuple[float, ...] = ()
    """Coefficients of older estimates, latest first. Only steps without noise have them: those are never replayed."""
    std: float = 0.0
    """Standard deviation of the next state, in its unit; 0 is a deterministic step."""
    diffusion: float = math.nan
    """FlowGRPO's sigma_d: ``std`` without the factor ``sqrt(-dt)``. NaN for samplers without that factor."""


@dataclass(frozen=True)
class Kernel:
    """A sampler: the start of a rollout, and its steps in order; the last one ends at x_0."""

    steps: tuple[Step, ...]
    sigmas: tuple[float, ...]
    """The grid, for the record: noise levels in [0, 1] of a flow, sigmas of EDM."""
    start_std: float = 1.0
    """Factor of the standard normal noise that a rollout starts from."""
    start_churn_std: float = 0.0
    """Standard deviation of more noise that is added at the start: EDM's churn of the first level."""

    @property
    def levels(self) -> tuple[float, ...]:
        """Return the noise levels in [0, 1] at which the model is called, in order, and a final 0."""
        return (*(step.t for step in self.steps), 0.0)

    @property
    def trainable(self) -> tuple[int, ...]:
        """Return the indices of the steps with a density, those with noise."""
        return tuple(step.index for step in self.steps if step.std > 0)
