"""The EDM sampler with churn of Cosmos-RL's world models: states ``x_0 + sigma noise``, sigma from 0.01 to 200."""

import math

from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.sampling.kernel import Kernel, Step

_RHO = 7
_MAX_CHURN = math.sqrt(1.2) - 1
"""Largest fraction by which churn lifts a sigma; EDM itself has sqrt(2) - 1."""
_MIN_LOG_STEP = 1e-6
"""Smallest step in ``ln sigma`` whose second-order weights keep their digits."""


def edm(config: SolverConfig) -> Kernel:
    """Return ``num_steps`` steps down the Karras grid and one more that ends at the estimate of x_0.

    Churn lifts each sigma strictly between ``s_t_min`` and ``s_t_max``, except the last one, by the fraction
    ``min(s_churn / (num_steps + 1), sqrt(1.2) - 1)``. The model gets the states after churn. So the churn of a level is
    the noise of the transition to it, and the last two steps are deterministic. ``solver_option`` is ``2ab``,
    exponential Adams-Bashforth with a first step of first order, or ``1euler``.
    Raises :class:`ConfigError` unless ``sigma_min < sigma_max``, and for churn that keeps sigma from falling.
    Source: EDM, arXiv:2206.00364, algorithm 2 and equation 5, with the constants of Cosmos-RL; 2AB: exponential
    integrators with phi functions, arXiv:2308.02157, in x_0 and ``-ln sigma``.
    """
    if not config.sigma_min < config.sigma_max:
        raise ConfigError(f"expected sigma_min < sigma_max, found {config.sigma_min} and {config.sigma_max}")
    sigmas = _karras(config)
    eta = min(config.s_churn / (config.num_steps + 1), _MAX_CHURN)
    bound = math.inf if config.s_t_max is None else config.s_t_max
    lifts = [eta if config.s_t_min < sigma < bound else 0.0 for sigma in sigmas[:-1]]
    lifted = [(1 + lift) * sigma for lift, sigma in zip(lifts, sigmas, strict=False)]
    stds = [config.s_noise * sigma * math.sqrt(lift**2 + 2 * lift) for lift, sigma in zip(lifts, sigmas, strict=False)]

    steps = []
    for i, (sigma, target, std) in enumerate(zip(lifted, sigmas[1:], [*stds[1:], 0.0], strict=True)):
        recall = _recall(lifted[i - 1], sigma, target) if i > 0 and config.solver_option == "2ab" else 0.0
        # The weights of x_0 and of its previous estimate sum to 1 - target / sigma.
        x_0 = 1 - target / sigma - recall
        t, scale = sigma / (1 + sigma), 1 / (1 + sigma)
        keep = target / sigma + x_0 * scale
        steps.append(Step(i, t, keep, push=-x_0 * t, input_scale=scale, recall=recall, std=std))
    t, scale = sigmas[-1] / (1 + sigmas[-1]), 1 / (1 + sigmas[-1])
    steps.append(Step(config.num_steps, t, keep=scale, push=-t, input_scale=scale))
    return Kernel(tuple(steps), sigmas, start_std=sigmas[0], start_churn_std=stds[0])


def _karras(config: SolverConfig) -> tuple[float, ...]:
    """Return ``num_steps + 1`` falling sigmas above 0, with exact ends. Source: EDM, equation 5, rho = 7."""
    high, low = config.sigma_max ** (1 / _RHO), config.sigma_min ** (1 / _RHO)
    inner = ((high + i / config.num_steps * (low - high)) ** _RHO for i in range(1, config.num_steps))
    return (config.sigma_max, *inner, config.sigma_min)


def _recall(previous: float, sigma: float, target: float) -> float:
    """Return the weight ``h b_2`` of x_0's estimate at ``previous`` in a 2AB step from ``sigma`` to ``target``."""
    h, back = math.log(sigma / target), math.log(previous / sigma)
    if min(h, back) < _MIN_LOG_STEP:
        raise ConfigError(
            f"sigma does not fall enough from {previous:.6g} over {sigma:.6g} to {target:.6g} for a second-order step; "
            "set a lower s_churn or fewer steps"
        )
    phi_1 = -math.expm1(-h) / h
    phi_2 = (1 - phi_1) / h
    return -h * h * phi_2 / back
