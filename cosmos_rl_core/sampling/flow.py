"""Samplers of a flow on a falling grid of noise levels: ``velocity = noise - x_0``, so ``x_0 = x - sigma velocity``.

In each formula ``sigma_next`` is the level after ``sigma`` and ``dt = sigma_next - sigma < 0``.
"""

import math
from itertools import pairwise

import numpy as np

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.sampling.kernel import Kernel, Step
from cosmos_rl_core.sampling.schedule import Schedule

_NEAR_ONE = 1 - 1e-5
"""Levels above this are pure noise: some schedulers have 1 - 1e-6, or a rounding below 1, for the level 1."""


def euler(schedule: Schedule) -> Kernel:
    """Return first-order steps ``x + dt velocity``, deterministic; equal to DDIM and DPM-Solver++ 1."""
    levels = enumerate(pairwise(schedule.sigmas))
    steps = (Step(i, t=sigma, keep=1, push=following - sigma) for i, (sigma, following) in levels)
    return Kernel(tuple(steps), schedule.sigmas)


def dpm2(schedule: Schedule) -> Kernel:
    """Return DPM-Solver++ 2M steps, midpoint form, deterministic; each uses the previous estimate of x_0.

    The first step, the step after sigma = 1, where the log-SNR is minus infinity, and the step to 0 are first order.
    The step before the last keeps its order even on coarse grids, where it over-disperses the samples.
    Source: DPM-Solver++, arXiv:2211.01095, algorithm 2.
    """
    steps = []
    for i, (sigma, following) in enumerate(pairwise(schedule.sigmas)):
        # (1 - sigma_next)(1 - e^-h) = 1 - sigma_next / sigma; this form has a limit at sigma = 1.
        slope = (1 - following / sigma) * 0.5 * _growth(schedule.sigmas, i)
        # The Euler step, plus slope times the change of x_0 since the last estimate.
        push = (following - sigma) - slope * sigma
        steps.append(Step(i, t=sigma, keep=1 + slope, push=push, recall=-slope))
    return Kernel(tuple(steps), schedule.sigmas)


def unipc(schedule: Schedule, order: int = 2) -> Kernel:
    """Return UniPC steps of ``order`` 1 to 3, B(h) = e^h - 1, predicting x_0, deterministic.

    Each step uses ``order`` estimates of x_0. The model gets the predictor's state; its output corrects that state
    before the next step begins, at every level but the last. The first and the last steps have a lower order.
    Source: UniPC, arXiv:2302.04867, algorithms 5 and 6, with the constants of diffusers.
    """
    sigmas, steps = schedule.sigmas, []
    # Weights of the estimates of x_0 at level i and before, latest first, in the corrector's change of the state.
    correction = [0.0] * (order + 1)
    for i, (sigma, following) in enumerate(pairwise(sigmas)):
        shrink, now = following / sigma, min(order, i + 1, schedule.num_steps - i)
        predicted = [*_estimates(sigmas, i, now), *[0.0] * (order + 1 - now)]
        weights = [shrink * c + p for c, p in zip(correction, predicted, strict=True)]
        here, recall, *older = weights
        # The step's own estimate of x_0 is x - sigma velocity.
        keep, push = shrink + here, -here * sigma
        steps.append(Step(i, t=sigma, keep=keep, push=push, recall=recall, recall_older=tuple(older)))
        if following > 0:
            corrected = [*_estimates(sigmas, i, now, corrects=True), *[0.0] * (order - now)]
            correction = [c - p for c, p in zip(corrected, [0.0, *predicted[:-1]], strict=True)]
    return Kernel(tuple(steps), sigmas)


def _estimates(sigmas: tuple[float, ...], i: int, order: int, *, corrects: bool = False) -> list[float]:
    """Return the weights of estimates of x_0 in a step of ``order`` from level i, latest first.

    They are the estimate at the end of the step, if it ``corrects``, at level i, and at the levels before. Their sum is
    1 minus the factor of the state.
    """
    gain = 1 - sigmas[i + 1] / sigmas[i]
    if order == 1 and not corrects:
        return [gain]
    alpha, here = 1 - sigmas[i + 1], _log_snr(sigmas[i])
    h = _log_snr(sigmas[i + 1]) - here
    # Positions of the other estimates in log-SNR, scaled so that the step goes from 0 to 1.
    nodes = [*[1.0] * corrects, *((_log_snr(sigmas[i - back]) - here) / h for back in range(1, order))]
    if len(nodes) == 1:
        moved = [gain / 2]
    else:
        # An estimate at pure noise is infinitely far away and gets no weight.
        near = [node for node in nodes if math.isfinite(node)]
        fitted = np.linalg.solve(np.vander(near, increasing=True).T, _moments(alpha, h, len(near)))
        moved = [*fitted.tolist(), 0.0, 0.0]
    differences = [weight / node for weight, node in zip(moved, nodes, strict=False)]
    own = gain - math.fsum(differences)
    return [differences[0], own, *differences[1:]] if corrects else [own, *differences]


def _moments(alpha: float, h: float, count: int) -> list[float]:
    """Return the required sums of the weighted powers 0, 1, ... of the nodes in a step of length h in log-SNR."""
    moments, rest = [], math.expm1(-h)
    for power in range(1, count + 1):
        rest = rest / -h - 1 / math.factorial(power)
        moments.append(-alpha * rest * math.factorial(power))
    return moments


def flow_sde(schedule: Schedule, noise_level: float) -> Kernel:
    """Return Euler-Maruyama steps of the SDE with the marginals of the flow; every step is stochastic, also the last.

    ``sigma_d = noise_level sqrt(sigma / (1 - sigma))`` and ``std = sigma_d sqrt(-dt)``. At sigma = 1, where sigma_d
    diverges, the denominator takes the second level of the grid. The last step is ill-conditioned: its deviation is far
    below other steps'.
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
                keep=1 + pull * dt,
                push=(1 + pull * (1 - sigma)) * dt,
                std=diffusion * math.sqrt(-dt),
                diffusion=diffusion,
            )
        )
    return Kernel(tuple(steps), schedule.sigmas)


def cps(schedule: Schedule, noise_level: float) -> Kernel:
    """Return coefficient-preserving steps: x_0 and noise have the weights of the next level; the last has no noise.

    ``std = sigma_next sin(noise_level pi / 2)`` of the noise is drawn anew. The rest,
    ``sigma_next cos(noise_level pi / 2)``, is the noise that the model predicts in x. That is a posterior mean, with
    less variance than noise itself: unlike with the SDE, samples keep less variance than the data on any grid.
    Raises :class:`ConfigError` if ``noise_level`` is not in (0, 1].
    Source: Flow-CPS, arXiv:2509.05952.
    """
    if not 0 < noise_level <= 1:
        raise ConfigError(f"cps needs a noise_level in (0, 1], found {noise_level}; euler samples without noise")
    fresh, kept = math.sin(noise_level * math.pi / 2), math.cos(noise_level * math.pi / 2)
    steps = []
    for i, (sigma, following) in enumerate(pairwise(schedule.sigmas)):
        # x_0 = x - sigma velocity and noise = x + (1 - sigma) velocity.
        keep = (1 - following) + following * kept
        push = following * kept * (1 - sigma) - (1 - following) * sigma
        steps.append(Step(i, t=sigma, keep=keep, push=push, std=following * fresh))
    return Kernel(tuple(steps), schedule.sigmas)


def _growth(sigmas: tuple[float, ...], i: int) -> float:
    """Return the length of step i in log-SNR, divided by the previous step's; 0 for steps of first order.

    Those are the first step, the step after sigma = 1, which is infinitely long, and the step to 0.
    """
    if i == 0 or sigmas[i + 1] == 0:
        return 0.0
    here = _log_snr(sigmas[i])
    return (_log_snr(sigmas[i + 1]) - here) / (here - _log_snr(sigmas[i - 1]))


def _log_snr(sigma: float) -> float:
    return -math.inf if sigma == 1 else math.log((1 - sigma) / sigma)
