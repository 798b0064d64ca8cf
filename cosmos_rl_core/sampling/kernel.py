"""A sampler as a table. The mean of every step is linear in the state, the velocity and earlier estimates of x_0.

``mean = keep x + push velocity + recall h``, with ``velocity = noise - x_0`` and h the estimate of x_0 made one step
earlier; a deterministic step may add some made before that. Coefficients are float64 and computed once, so a
rollout and its replay differ in nothing but the velocity.
States are flow states ``x_t = (1 - t) x_0 + t noise``, or EDM states ``x_0 + sigma noise`` with ``t = sigma / (1 +
sigma)``; ``input_scale`` makes the one what the model takes, the other it leaves alone.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

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
    recall_older: tuple[float, ...] = ()
    """Coefficients of the estimates before that one, latest first. Only of steps without noise, which nothing replays.
    """
    std: float = 0.0
    """Standard deviation of the next state, in units of the state; 0 is a deterministic step."""
    diffusion: float | None = None
    """FlowGRPO's sigma_d: ``std`` without the factor ``sqrt(-dt)``. None for a sampler that has no such split."""


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
