"""Rewards to advantages relative to the prompt's other samples: what the rewarded algorithms share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cosmos_rl_core.errors import ArtifactError

if TYPE_CHECKING:
    import pandas as pd

STD_FLOOR = 1e-4
"""Added to the standard deviation of rewards."""


def rewards_of(samples: pd.DataFrame, column: str) -> np.ndarray:
    """A column of rewards, float64, one a row of ``samples``; NaN where the sample is not ``valid``.

    Raises :class:`ArtifactError` if a sample marked valid has a reward that is not finite.
    """
    valid = samples["valid"].to_numpy(bool)
    rewards = np.where(valid, samples[column].to_numpy(np.float64, na_value=np.nan), np.nan)
    broken = valid & ~np.isfinite(rewards)
    if broken.any():
        raise ArtifactError(f"valid samples without a finite {column}: {', '.join(samples['sample_id'][broken])}")
    return rewards


def centred(rewards: np.ndarray) -> np.ndarray:
    """Rewards minus their mean, exactly 0 where all are equal: the mean of equal numbers can miss them by rounding."""
    shifted = rewards - rewards.min()
    return shifted - shifted.mean()


def group_advantages(
    rewards: np.ndarray,
    prompt_ids: np.ndarray,
    *,
    min_group_size: int,
    global_std: bool,
    ddof: int,
    fill: bool = False,
) -> np.ndarray:
    """Rewards minus their prompt's mean, over the standard deviation + 1e-4; NaN for excluded samples.

    A reward of NaN counts in no mean and no deviation. Prompts with fewer than ``min_group_size`` rewards are dropped,
    though theirs still count in the deviation of ``global_std``, which is over all prompts. Equal rewards give exactly
    0. ``ddof`` is 0 for the population's deviation, 1 for the unbiased one. ``fill`` gives the mean of its prompt to a
    sample without a reward, before everything else.
    Source: GRPO, arXiv:2402.03300, section 4.1.2, with the floor.
    """
    _, group_of = np.unique(prompt_ids, return_inverse=True)
    groups = [np.flatnonzero(group_of == group) for group in range(group_of.max(initial=-1) + 1)]
    kept = [members for members in groups if np.count_nonzero(~np.isnan(rewards[members])) >= min_group_size]
    if fill:
        rewards = rewards.copy()
        for members in kept:
            rewards[members] = _filled(rewards[members])
    overall = _deviation(rewards[~np.isnan(rewards)], ddof)
    advantages = np.full(len(rewards), np.nan)
    for members in kept:
        scored = members[~np.isnan(rewards[members])]
        deviation = overall if global_std else _deviation(rewards[scored], ddof)
        advantages[scored] = centred(rewards[scored]) / (deviation + STD_FLOOR)
    return advantages


def _filled(rewards: np.ndarray) -> np.ndarray:
    # the mean above the lowest, so that equal rewards are filled with themselves and not with something near
    low = np.nanmin(rewards)
    return np.where(np.isnan(rewards), low + np.nanmean(rewards - low), rewards)


def _deviation(rewards: np.ndarray, ddof: int) -> float:
    """Standard deviation; NaN of too few."""
    return float(rewards.std(ddof=ddof)) if len(rewards) > ddof else np.nan
