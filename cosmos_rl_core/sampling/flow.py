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
        # (1 - sigma_next)(1 - e^-h) = 1 - sigma_next / sigma: written so, it has its limit at sigma = 1
        slope = (1 - following / sigma) * 0.5 * _growth(schedule.sigmas, i)
        # the Euler step, and slope times how far x_0 moved since the last estimate
        push = (following - sigma) - slope * sigma
        steps.append(Step(i, t=sigma, input_scale=1, keep=1 + slope, push=push, recall=-slope))
    return Kernel(tuple(steps), schedule.sigmas)


def unipc(schedule: Schedule) -> Kernel:
    """UniPC steps of second order, B(h) = e^h - 1, predicting x_0, deterministic; each recalls two estimates of x_0.

    The state that the model is fed is the predictor's, whose steps are those of :func:`dpm2`; its answer corrects that
    state before the next step begins. The corrector is first order at the second level and there is none at the last.
    Source: UniPC, arXiv:2302.04867, algorithms 5 and 6, with the constants of diffusers.
    """
    sigmas = schedule.sigmas
    steps = []
    for i, (sigma, following) in enumerate(pairwise(sigmas)):
        slope = 0.5 * _growth(sigmas, i)
        shrink, gain = following / sigma, 1 - following / sigma
        new, last, older = _correction(sigmas, i)
        # weights of this estimate of x_0 and of the last one: the corrector's, then the predictor's
        here, recall = shrink * new + gain * (1 + slope), shrink * last - gain * slope
        steps.append(
            Step(
                i,
                t=sigma,
                input_scale=1,
                keep=shrink + here,
                push=-here * sigma,
                recall=recall,
                recall_older=shrink * older,
            )
        )
    return Kernel(tuple(steps), sigmas)


def _correction(sigmas: tuple[float, ...], i: int) -> tuple[float, float, float]:
    """What the corrector adds to the state at level i: weights of the estimates of x_0 made there and at the two levels
    before. They sum to 0."""
    if i == 0:
        return 0.0, 0.0, 0.0
    gain = 1 - sigmas[i] / sigmas[i - 1]
    if i == 1:
        return gain / 2, -gain / 2, 0.0
    h = _log_snr(sigmas[i]) - _log_snr(sigmas[i - 1])
    phi_1 = -math.expm1(-h) / h
    # moments that the corrector's weights of both differences have to meet; the older one is at -1 / growth
    first, second = (1 - phi_1) / (h * phi_1), (2 * (phi_1 - 1) + h) / (h**2 * phi_1)
    growth = _growth(sigmas, i - 1)
    back = growth * (first - second) / (1 + growth)
    ahead = first - back
    # less the predictor's own use of the older difference
    spread = gain * growth * (0.5 - back)
    return gain * ahead, -gain * ahead - spread, spread


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


def _growth(sigmas: tuple[float, ...], i: int) -> float:
    """How many times longer than the step before, in log-SNR, step i is; 0 where there is no second order.

    That is the first step, the one after sigma = 1, which is infinitely long, and the step to 0.
    """
    if i == 0 or sigmas[i + 1] == 0:
        return 0.0
    here = _log_snr(sigmas[i])
    return (_log_snr(sigmas[i + 1]) - here) / (here - _log_snr(sigmas[i - 1]))


def _log_snr(sigma: float) -> float:
    return -math.inf if sigma == 1 else math.log((1 - sigma) / sigma)
