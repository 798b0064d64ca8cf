"""Noise levels and noise of training samples; a key decides each draw."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from cosmos_rl_core import seeds

if TYPE_CHECKING:
    from cosmos_rl_core.config.policy import TimeDensity

FINE_GRID = 1000
"""Number of noise levels in the grid of supervised training."""


class DrawKey(NamedTuple):
    """The key of the draws for one sample in one epoch, independent of batch, rank and earlier draws."""

    run_seed: int
    iteration: int
    epoch: int
    sample_id: str


def random_times(sigmas: tuple[float, ...], num_times: int, key: DrawKey) -> list[float]:
    """Draw ``num_times`` distinct noise levels from a schedule's ``sigmas`` without its final 0, in random order."""
    order = seeds.permutation(len(sigmas) - 1, "training times", *key)
    return [sigmas[index] for index in order[:num_times]]


def training_noise(shape: tuple[int, ...], key: DrawKey, time_index: int) -> Tensor:
    """Draw standard normal noise for a sample at its ``time_index``-th noise level, float32 on the CPU."""
    return torch.from_numpy(seeds.normal(shape, "training noise", *key, time_index))


def posterior_noise(shape: tuple[int, ...], key: DrawKey) -> Tensor:
    """Draw the standard normal noise that a posterior is sampled with in one pass, float32 on the CPU."""
    return torch.from_numpy(seeds.normal(shape, "posterior", *key))


def sft_time(sigmas: tuple[float, ...], config: TimeDensity, key: DrawKey) -> float:
    """Draw the noise level of a sample in one epoch from a fine schedule's ``sigmas`` without its final 0.

    ``weighting_scheme`` is the density over places in the grid, counted from the clean end. The grid contains the
    pipeline's shift: with SD3's shift of 3 the median place, 1/2, has the level 0.75.
    Source: SD3, arXiv:2403.03206, section 3.1, on the scheduler's own grid.
    """
    generator = seeds.generator("sft time", *key)
    if config.weighting_scheme == "logit_normal":
        place = (1 + math.tanh((config.logit_mean + config.logit_std * generator.standard_normal()) / 2)) / 2
    else:
        place = generator.random()
    num_steps = len(sigmas) - 1
    return sigmas[num_steps - 1 - min(int(place * num_steps), num_steps - 1)]
