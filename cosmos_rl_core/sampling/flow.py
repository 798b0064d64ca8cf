"""Samplers of a flow on a falling grid of noise levels. ``velocity = noise - x_0``, hence ``x_0 = x - sigma velocity``.

In each formula ``sigma_next`` is the level after ``sigma`` and ``dt = sigma_next - sigma < 0``.
"""

import math
from itertools import pairwise

import numpy as np

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


def unipc(schedule: Schedule, order: int = 2) -> Kernel:
    """UniPC steps of ``order`` 1 to 3, B(h) = e^h - 1, predicting x_0, deterministic; each recalls ``order`` estimates
    of x_0.

    The state that the model is fed is the predictor's; its answer corrects that state before the next step begins, at
    every level but the last. The first and the last steps are of lower order.
    Source: UniPC, arXiv:2302.04867, algorithms 5 and 6, with the constants of diffusers.
    """
    sigmas, steps = schedule.sigmas, []
    # Of the estimates of x_0 made at level i and before, latest first: what the corrector adds to the state there.
    correction = [0.0] * (order + 1)
    for i, (sigma, following) in enumerate(pairwise(sigmas)):
        shrink, now = following / sigma, min(order, i + 1, schedule.num_steps - i)
        predicted = [*_estimates(sigmas, i, now), *[0.0] * (order + 1 - now)]
        weights = [shrink * c + p for c, p in zip(correction, predicted, strict=True)]
        steps.append(_multistep(i, sigma, shrink, weights))
        if following > 0:
            corrected = [*_estimates(sigmas, i, now, corrects=True), *[0.0] * (order - now)]
            correction = [c - p for c, p in zip(corrected, [0.0, *predicted[:-1]], strict=True)]
    return Kernel(tuple(steps), sigmas)


def _multistep(i: int, sigma: float, shrink: float, estimates: list[float]) -> Step:
    """The step to ``shrink`` times the state and weighted estimates of x_0, the latest of which is made now."""
    here, recall, *older = estimates
    return Step(
        i, t=sigma, input_scale=1, keep=shrink + here, push=-here * sigma, recall=recall, recall_older=tuple(older)
    )


def _estimates(sigmas: tuple[float, ...], i: int, order: int, *, corrects: bool = False) -> list[float]:
    """Weights of estimates of x_0 in a step of ``order`` from level i, beside the state that it shrinks: of the one
    made where the step ends, if it ``corrects``, of that at level i, and of those before. They sum to what it shrinks.
    """
    gain = 1 - sigmas[i + 1] / sigmas[i]
    if order == 1 and not corrects:
        return [gain]
    alpha, here = 1 - sigmas[i + 1], _log_snr(sigmas[i])
    h = _log_snr(sigmas[i + 1]) - here
    # Where the other estimates were made, in log-SNR: the step is from 0 to 1.
    nodes = [*[1.0] * corrects, *((_log_snr(sigmas[i - back]) - here) / h for back in range(1, order))]
    if len(nodes) == 1:
        moved = [gain / 2]
    else:
        # An estimate that was made infinitely far away, at pure noise, says nothing.
        near = [node for node in nodes if math.isfinite(node)]
        fitted = np.linalg.solve(np.vander(near, increasing=True).T, _moments(alpha, h, len(near)))
        moved = [*fitted.tolist(), 0.0, 0.0]
    differences = [weight / node for weight, node in zip(moved, nodes, strict=False)]
    own = gain - math.fsum(differences)
    return [differences[0], own, *differences[1:]] if corrects else [own, *differences]


def _moments(alpha: float, h: float, count: int) -> list[float]:
    """What the weighted powers 0, 1, ... of the nodes have to sum to in a step of length h in log-SNR."""
    moments, rest = [], math.expm1(-h)
    for power in range(1, count + 1):
        rest = rest / -h - 1 / math.factorial(power)
        moments.append(-alpha * rest * math.factorial(power))
    return moments


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
