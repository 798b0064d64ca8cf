"""Deterministic solver steps of the flow ODE. ``velocity = noise - x_0``, hence ``x_0 = x - sigma velocity``.

A solver is a pure function: what a multistep method remembers goes in and comes out, nothing is kept. A stochastic
kernel has the same shape: a closure over its noise level and over a function from ``step.index`` to a draw.
"""

import math
from typing import Any, Protocol

from torch import Tensor

from cosmos_rl_core.sampling.schedule import Step


class Solver(Protocol):
    """One step of a sampler."""

    def __call__(self, x: Tensor, velocity: Tensor, step: Step, history: Any) -> tuple[Tensor, Any]:
        """The state at ``step.sigma_next`` and the history for the next call; ``history`` is None on the first one."""
        ...


def euler(x: Tensor, velocity: Tensor, step: Step, history: None = None) -> tuple[Tensor, None]:
    """First-order step ``x + (sigma_next - sigma) velocity``, the shape of ``x``; equals DDIM and DPM-Solver++ 1."""
    return x + (step.sigma_next - step.sigma) * velocity, None


def dpm2(
    x: Tensor, velocity: Tensor, step: Step, history: tuple[Tensor, float] | None = None
) -> tuple[Tensor, tuple[Tensor, float]]:
    """DPM-Solver++ 2M step, midpoint form, the shape of ``x``; remembers the last estimate of x_0 and its sigma.

    The first step and the step to 0 are first order, as is the one after sigma = 1, where the log-SNR is minus
    infinity. The step before the last keeps its order, also on coarse grids, where that over-disperses the samples.
    Source: DPM-Solver++, arXiv:2211.01095, algorithm 2.
    """
    x_0 = x - step.sigma * velocity
    target = x_0
    if history is not None and step.sigma_next > 0:
        last_x_0, last_sigma = history
        here = _log_snr(step.sigma)
        inverse_ratio = (_log_snr(step.sigma_next) - here) / (here - _log_snr(last_sigma))
        target = x_0 + 0.5 * inverse_ratio * (x_0 - last_x_0)
    # (1 - sigma_next)(1 - e^-h) = 1 - sigma_next / sigma: written so, it has its limits at sigma = 1 and sigma_next = 0
    kept = step.sigma_next / step.sigma
    return kept * x + (1 - kept) * target, (x_0, step.sigma)


def _log_snr(sigma: float) -> float:
    return -math.inf if sigma == 1 else math.log((1 - sigma) / sigma)


SOLVERS: dict[str, Solver] = {"euler": euler, "dpm2": dpm2}
"""By the name that ``policy.diffusers.sample.solver`` gives them."""
