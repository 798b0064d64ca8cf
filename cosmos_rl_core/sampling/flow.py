"""Samplers of a flow on a falling grid of noise levels. ``velocity = noise - x_0``, hence ``x_0 = x - sigma velocity``.

In each formula ``sigma_next`` is the level after ``sigma`` and ``dt = sigma_next - sigma < 0``.
"""

import math
from itertools import pairwise

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.sampling.kernel import Kernel, Step
from cosmos_rl_core.sampling.schedule import Schedule

_NEAR_ONE = 1 - 1e-5
"""Some schedulers put the level 1 at 1 - 1e-6, or a rounding below 1; both mean pure noise."""


def euler(schedule: Schedule) -> Kernel:
    """First-order steps ``x + dt velocity``, deterministic; equals DDIM and DPM-Solver++ 1."""
    levels = enumerate(pairwise(schedule.sigmas))
    steps = (Step(i, t=sigma, input_scale=1, keep=1, push=following - sigma) for i, (sigma, following) in levels)
    return Kernel(tuple(steps), schedule.sigmas)


def dpm2(schedule: Schedule) -> Kernel:
    """DPM-Solver++ 2M steps, midpoint form, deterministic; each recalls the last estimate of x_0.

    The first step and the step to 0 are first order, as is the one after sigma = 1, where the log-SNR is minus
    infinity. The step before the last keeps its order, also on coarse grids, where that over-disperses the samples.
    Source: DPM-Solver++, arXiv:2211.01095, algorithm 2.
    """
    steps = []
    for i, (sigma, following) in enumerate(pairwise(schedule.sigmas)):
        slope = 0.0
        if i > 0 and following > 0:
            here = _log_snr(sigma)
            inverse_ratio = (_log_snr(following) - here) / (here - _log_snr(schedule.sigmas[i - 1]))
            # (1 - sigma_next)(1 - e^-h) = 1 - sigma_next / sigma: written so, it has its limit at sigma = 1
            slope = (1 - following / sigma) * 0.5 * inverse_ratio
        # the Euler step, and slope times how far x_0 moved since the last estimate
        push = (following - sigma) - slope * sigma
        steps.append(Step(i, t=sigma, input_scale=1, keep=1 + slope, push=push, recall=-slope))
    return Kernel(tuple(steps), schedule.sigmas)


def flow_sde(schedule: Schedule, noise_level: float) -> Kernel:
    """Euler-Maruyama steps of the SDE that has the marginals of the flow; every step is stochastic, also the last.

    ``sigma_d = noise_level sqrt(sigma / (1 - sigma))`` and ``std = sigma_d sqrt(-dt)``. At sigma = 1, where sigma_d
    diverges, the denominator has the second level of the grid. The last step is ill-conditioned: its deviation is far
    below the others.
    Raises :class:`ConfigError` if ``noise_level`` is not positive and finite.
    Source: FlowGRPO, arXiv:2505.05470; the second level at sigma = 1 and the noise on the last step: its released code.
    """
    if not 0 < noise_level < math.inf:
        raise ConfigError(f"the flow SDE needs a noise_level above 0, found {noise_level}; euler samples without noise")
    steps = []
    for i, (sigma, following) in enumerate(pairwise(schedule.sigmas)):
        dt = following - sigma
        diffusion = noise_level * math.sqrt(sigma / (1 - (schedule.sigmas[1] if sigma > _NEAR_ONE else sigma)))
        pull = diffusion**2 / (2 * sigma)
        steps.append(
            Step(
                i,
                t=sigma,
                input_scale=1,
                keep=1 + pull * dt,
                push=(1 + pull * (1 - sigma)) * dt,
                std=diffusion * math.sqrt(-dt),
                diffusion=diffusion,
            )
        )
    return Kernel(tuple(steps), schedule.sigmas)


def cps(schedule: Schedule, noise_level: float) -> Kernel:
    """Coefficient-preserving steps: x_0 and noise keep the weights of the next level; the last is deterministic.

    ``std = sigma_next sin(noise_level pi / 2)`` of the noise is drawn anew, the rest,
    ``sigma_next cos(noise_level pi / 2)``, is the noise the model sees in x. That is a posterior mean, less spread than
    noise itself: unlike the SDE's, these samples stay less spread than the data however fine the grid.
    Raises :class:`ConfigError` if ``noise_level`` is not in (0, 1].
    Source: Flow-CPS, arXiv:2509.05952.
    """
    if not 0 < noise_level <= 1:
        raise ConfigError(f"cps needs a noise_level in (0, 1], found {noise_level}; euler samples without noise")
    fresh, kept = math.sin(noise_level * math.pi / 2), math.cos(noise_level * math.pi / 2)
    steps = []
    for i, (sigma, following) in enumerate(pairwise(schedule.sigmas)):
        # x_0 = x - sigma velocity and noise = x + (1 - sigma) velocity
        keep = (1 - following) + following * kept
        push = following * kept * (1 - sigma) - (1 - following) * sigma
        steps.append(Step(i, t=sigma, input_scale=1, keep=keep, push=push, std=following * fresh))
    return Kernel(tuple(steps), schedule.sigmas)


def _log_snr(sigma: float) -> float:
    return -math.inf if sigma == 1 else math.log((1 - sigma) / sigma)
