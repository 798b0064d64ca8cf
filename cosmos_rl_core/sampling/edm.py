"""The EDM sampler with churn of Cosmos-RL's world models: states ``x_0 + sigma noise``, sigma from 0.01 to 200."""

import math

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.sampling.kernel import Kernel, Step

_RHO = 7
_MAX_CHURN = math.sqrt(1.2) - 1
"""Most by which churn lifts a sigma, as a fraction of it; EDM itself has sqrt(2) - 1."""
_MIN_LOG_STEP = 1e-6
"""Below this the second-order weights lose all their digits."""


def edm(
    num_steps: int,
    *,
    sigma_max: float = 200.0,
    sigma_min: float = 0.01,
    s_churn: float = 1.0,
    s_noise: float = 1.0,
    s_t_min: float = 0.0,
    s_t_max: float = math.inf,
    solver_option: str = "2ab",
) -> Kernel:
    """``num_steps`` steps down the Karras grid, and one more that ends at the estimate of x_0: ``num_steps + 1`` steps.

    Churn lifts a sigma strictly between ``s_t_min`` and ``s_t_max`` by the fraction ``min(s_churn / (num_steps + 1),
    sqrt(1.2) - 1)``, the last sigma never. States are those after churn, which is what the model is fed; so the churn
    of a level is the noise of the transition to it, and the last two steps are deterministic. ``solver_option`` is
    ``2ab``, exponential Adams-Bashforth with a first step of first order, or ``1euler``.
    Raises :class:`ConfigError` for another solver, a number out of its range, or churn that keeps sigma from falling.
    Source: EDM, arXiv:2206.00364, algorithm 2 and equation 5, with the constants of Cosmos-RL; 2AB: exponential
    integrators with phi functions, arXiv:2308.02157, in x_0 and ``-ln sigma``.
    """
    _check(num_steps, sigma_max, sigma_min, s_churn, s_noise, solver_option)
    sigmas = _karras(num_steps, sigma_max, sigma_min)
    eta = min(s_churn / (num_steps + 1), _MAX_CHURN)
    lifts = [eta if s_t_min < sigma < s_t_max else 0.0 for sigma in sigmas[:-1]]
    lifted = [(1 + lift) * sigma for lift, sigma in zip(lifts, sigmas, strict=False)]
    stds = [s_noise * sigma * math.sqrt(lift**2 + 2 * lift) for lift, sigma in zip(lifts, sigmas, strict=False)]

    steps = []
    for i, (sigma, target, std) in enumerate(zip(lifted, sigmas[1:], [*stds[1:], 0.0], strict=True)):
        recall = _recall(lifted[i - 1], sigma, target) if i > 0 and solver_option == "2ab" else 0.0
        # the weights of x_0 and of its previous estimate sum to 1 - target / sigma
        x_0 = 1 - target / sigma - recall
        t, scale = sigma / (1 + sigma), 1 / (1 + sigma)
        steps.append(Step(i, t, scale, keep=target / sigma + x_0 * scale, push=-x_0 * t, recall=recall, std=std))
    t, scale = sigmas[-1] / (1 + sigmas[-1]), 1 / (1 + sigmas[-1])
    steps.append(Step(num_steps, t, scale, keep=scale, push=-t))
    return Kernel(tuple(steps), sigmas, start_std=sigmas[0], start_churn_std=stds[0])


def _karras(num_steps: int, sigma_max: float, sigma_min: float) -> tuple[float, ...]:
    """``num_steps + 1`` falling sigmas, none of them 0; the ends are exact. Source: EDM, equation 5, rho = 7."""
    high, low = sigma_max ** (1 / _RHO), sigma_min ** (1 / _RHO)
    inner = ((high + i / num_steps * (low - high)) ** _RHO for i in range(1, num_steps))
    return (sigma_max, *inner, sigma_min)


def _recall(previous: float, sigma: float, target: float) -> float:
    """The weight ``h b_2`` of the estimate of x_0 made at ``previous`` in a 2AB step from ``sigma`` to ``target``."""
    h, back = math.log(sigma / target), math.log(previous / sigma)
    if min(h, back) < _MIN_LOG_STEP:
        raise ConfigError(
            f"sigma does not fall enough from {previous:.6g} over {sigma:.6g} to {target:.6g} for a second-order step; "
            "take a lower s_churn or fewer steps"
        )
    phi_1 = -math.expm1(-h) / h
    phi_2 = (1 - phi_1) / h
    return -h * h * phi_2 / back


def _check(
    num_steps: int, sigma_max: float, sigma_min: float, s_churn: float, s_noise: float, solver_option: str
) -> None:
    problems = []
    if solver_option not in ("2ab", "1euler"):
        problems.append(f"unknown solver_option {solver_option!r}; known: 1euler, 2ab")
    if num_steps < 1:
        problems.append(f"a rollout needs at least 1 step, found {num_steps}")
    if not 0 < sigma_min < sigma_max < math.inf:
        problems.append(f"expected 0 < sigma_min < sigma_max, found {sigma_min} and {sigma_max}")
    if not (0 <= s_churn < math.inf and 0 <= s_noise < math.inf):
        problems.append(f"expected s_churn and s_noise of at least 0, found {s_churn} and {s_noise}")
    if problems:
        raise ConfigError("; ".join(problems))
