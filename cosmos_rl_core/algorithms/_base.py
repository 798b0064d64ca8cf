"""What an algorithm plugin offers. It works on tensors by their methods and never imports torch when it runs.

That keeps ``Options`` readable by flows. A plugin file has a class ``Options`` (an :class:`AlgorithmOptions`) and a
class ``Algorithm``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import pandas as pd

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """A micro-batch at one noise level each; B samples."""

    x_0: Tensor
    """Clean latents ``[B, ...]``, float32."""
    noise: Tensor
    """Standard normal, the shape of ``x_0``."""
    t: Tensor
    """Noise level of each sample ``[B]`` in [0, 1]."""
    advantages: Tensor | None
    """One number a sample ``[B]``; None where the algorithm needs no reward."""

    @property
    def per_sample(self) -> tuple[int, ...]:
        """Shape that broadcasts a ``[B]`` tensor over the latents."""
        return (-1, *[1] * (self.x_0.ndim - 1))

    @property
    def x_t(self) -> Tensor:
        """Noised latents ``(1 - t) x_0 + t noise``."""
        t = self.t.view(self.per_sample)
        return (1 - t) * self.x_0 + t * self.noise


@dataclass(frozen=True)
class Loss:
    """Per-sample loss ``[B]`` (float32, with gradient) and numbers worth a curve, each ``[B]`` and detached."""

    per_sample: Tensor
    metrics: dict[str, Tensor]


class Algorithm(Protocol):
    """Rewards to advantages, a loss, and what happens to the slow copies at the end of an iteration."""

    behaviour: str
    """The policy part that generates rollouts: ``current`` or ``old``."""
    roles: tuple[str, ...]
    """The policy parts that its loss asks for."""

    def advantages(self, samples: pd.DataFrame) -> pd.DataFrame:
        """Advantages of scored samples: in, columns ``sample_id, prompt_id, reward, valid``; out, the same rows with
        ``advantage`` (NaN where the sample is excluded) and ``used``. Never makes up a number for a failed sample."""
        ...

    def num_times(self, num_steps: int) -> int:
        """How many noise levels of a rollout's grid of ``num_steps`` each sample is trained on."""
        ...

    def loss(self, velocity: Callable[[str], Tensor], batch: Batch) -> Loss:
        """``velocity(part)`` is the prediction at ``batch.x_t, batch.t`` of a policy part: ``current`` with gradient,
        every other (``old``, ``reference``) without. Call ``current`` last."""
        ...

    def old_decay(self, iteration: int) -> float | None:
        """Decay d of ``old <- d old + (1 - d) current`` after 0-based ``iteration``; None if there is no old copy."""
        ...
