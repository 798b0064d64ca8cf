"""Values of schedules at a step, as plain numbers. Imports no torch, so that a plan can compute them."""

import math

from cosmos_rl_core.config.shared import OptimizerSteps
from cosmos_rl_core.config.train import EmaConfig, OptimizationConfig, OptimizerConfig


def optimizer_steps(config: OptimizationConfig, first_step: int, count: int) -> OptimizerSteps:
    """Return a range of optimizer steps with every schedule resolved to its values."""
    steps = range(first_step, first_step + count)
    return OptimizerSteps(
        lrs=tuple(config.optm_lr * lr_factor(config, step) for step in steps),
        ema_decays=tuple(ema_decay(config, step) for step in steps),
        betas=config.optm_betas,
        epsilon=config.epsilon,
        weight_decay=config.optm_weight_decay,
        grad_norm_clip=config.optm_grad_norm_clip,
        first_step=first_step,
        optimizer=config.optm_name,
        max_nonfinite=config.max_nonfinite_steps,
    )


def lr_factor(config: OptimizerConfig, step: int) -> float:
    """Return the multiplier of the peak learning rate at 0-based optimizer ``step``: warm-up, constant, decay.

    With w warm-up steps the multiplier at k < w is ``f0 + (1 - f0) k / (w - 1)``; with ``optm_peak_after_warmup`` the
    divisor is w. With f0 = 0 the first step moves nothing. The decay covers the last ``optm_decay_ratio`` of
    ``max_num_steps``, at most all steps after the warm-up, and ends at the floor.
    """
    warmup = config.optm_warmup_steps
    if step < warmup:
        start = config.optm_warmup_start_factor
        rises = warmup if config.optm_peak_after_warmup else warmup - 1
        return start + (1 - start) * step / rises if rises else 1.0
    if config.optm_decay_type == "none" or config.max_num_steps is None:
        return 1.0
    total = config.max_num_steps
    longest = total - warmup
    decay = longest if config.optm_decay_ratio is None else min(round(total * config.optm_decay_ratio), longest)
    stable = total + 1 - warmup - decay
    if step < warmup + stable:
        return 1.0
    progress = min((step + 1 - warmup - stable) / decay, 1.0)
    floor = config.optm_min_lr_factor
    return floor + (1 - floor) * _DECAYS[config.optm_decay_type](progress)


_DECAYS = {
    "linear": lambda p: 1 - p,
    "sqrt": lambda p: 1 - math.sqrt(p),
    "cosine": lambda p: (1 + math.cos(math.pi * p)) / 2,
}


def ema_decay(config: EmaConfig, step: int) -> float | None:
    """Return the decay of the moving average after 0-based optimizer ``step`` k, None if the step does not update it.

    The decay is ``min((1 + k) / (10 + k), ema_decay)``; with ``ema_first_step`` = 1 steps are counted from 1. With
    ``ema_rate`` the decay is ``(1 - n / (k + 1)) ** (gamma + 1)`` for updates every n steps. The weight of earlier
    steps is then a power of time, and the first update copies the policy.
    Source: power function averages, arXiv:2312.02696, section 3.1.
    """
    interval, step = config.ema_update_step_interval, step + config.ema_first_step
    if not config.ema_enable or (step + 1) % interval:
        return None
    if config.ema_rate is not None:
        return (1 - interval / (step + 1)) ** (power_of_rate(config.ema_rate) + 1)
    return min((1 + step) / (10 + step), config.ema_decay)


def power_of_rate(rate: float) -> float:
    """Return gamma >= 0 for which the density of ``t ** gamma`` on [0, 1] has the standard deviation ``rate``.

    The deviation, ``sqrt((gamma + 1) / ((gamma + 2)^2 (gamma + 3)))``, falls with gamma from 1 / sqrt(12). Found by
    bisection in plain floats, because roots from a numerics library differ in their last bits between machines.
    """

    def deviation(gamma: float) -> float:
        return math.sqrt((gamma + 1) / (gamma + 3)) / (gamma + 2)

    low, high = 0.0, 1.0 / rate
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if deviation(middle) > rate else (low, middle)
    return low
