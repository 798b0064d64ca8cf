"""Advantages of samples relative to other samples of their prompt, for all rewarded algorithms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from cosmos_rl_core.errors import ArtifactError

Mixing = Literal["sum", "gdpo"]

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

STD_FLOOR = 1e-4
"""Number added to the standard deviation of rewards of any scale, as in DiffusionNFT and FlowGRPO."""


HELD = "held"
"""Column of bool: True for samples to which a gate with ``on_fail = "worst"`` gives the lowest place of their prompt.
Their rewards are copies from the passing sample of the prompt with the lowest reward."""
BEATS, DROPPED = "beats", "dropped"
"""Columns of algorithms that train on pairs: the ids of the samples that this sample is preferred to, separated by
spaces; and the number of pairs that this sample would have won but that were left out."""


def rewards_of(samples: pd.DataFrame, column: str) -> np.ndarray:
    """Return a column of rewards, float64 ``[len(samples)]``; NaN for samples that are not ``valid``.

    Raises :class:`ArtifactError` if a valid sample has a reward that is not finite.
    """
    valid = samples["valid"].to_numpy(bool)
    rewards = np.where(valid, samples[column].to_numpy(np.float64, na_value=np.nan), np.nan)
    broken = valid & ~np.isfinite(rewards)
    if broken.any():
        raise ArtifactError(f"valid samples without a finite {column}: {', '.join(samples['sample_id'][broken])}")
    return rewards


def centred(rewards: np.ndarray) -> np.ndarray:
    """Return rewards minus their mean, ``[N]``; exactly 0 for equal rewards, whose mean may differ by rounding."""
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
    """Return rewards minus their prompt's mean, divided by the standard deviation + 1e-4, ``[N]``; NaN if excluded.

    ``rewards`` and ``prompt_ids`` are ``[N]``. A reward of NaN counts in no mean and no deviation. Prompts with fewer
    than ``min_group_size`` rewards are excluded, but count in the deviation over all prompts, which ``global_std``
    takes instead of each prompt's own. Equal rewards give exactly 0. ``ddof`` is 0 for the population's deviation, 1
    for the sample's. ``fill`` first replaces a reward of NaN by the mean of its prompt.
    Source: GRPO, arXiv:2402.03300, section 4.1.2, with a floor of the deviation.
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


def at_lowest(advantages: np.ndarray, prompt_ids: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Lower the advantages of ``held`` samples to the lowest of their prompt, then centre that prompt's again.

    The arguments and the result are ``[N]``. Held samples get NaN if their prompt has no other advantage. Advantages of
    prompts without a held sample keep their bits.
    """
    placed = np.where(held, np.nan, advantages)
    for prompt in np.unique(prompt_ids[held]):
        members = np.flatnonzero(prompt_ids == prompt)
        if not np.isnan(lowest := np.fmin.reduce(placed[members])):
            placed[members[held[members]]] = lowest
            known = members[~np.isnan(placed[members])]
            placed[known] = centred(placed[known])
    return placed


def floor_share(rewards: np.ndarray, prompt_ids: np.ndarray, *, global_std: bool) -> float:
    """Return the share by which :data:`STD_FLOOR` shrinks advantages: ``floor / (std + floor)``, in [0, 1), unitless.

    It is the mean over prompts or, with ``global_std``, one share for all rewards. Rewards of NaN and prompts of equal
    rewards, whose advantages are 0 anyway, are left out; 0 if nothing is left.
    """
    groups = [rewards] if global_std else [rewards[prompt_ids == prompt] for prompt in np.unique(prompt_ids)]
    known = [group[~np.isnan(group)] for group in groups]
    deviations = np.array([group.std() for group in known if len(group) and np.ptp(group) > 0])
    return float(np.mean(STD_FLOOR / (deviations + STD_FLOOR))) if len(deviations) else 0.0


def decoupled(samples: pd.DataFrame, weights: Mapping[str, float]) -> pd.DataFrame:
    """Return samples whose ``reward`` is the weighted sum of rewards that were each normalised within their prompts.

    ``samples`` has the scores as ``score.<name>``. The column ``reward.<name>`` is the weight times the score minus the
    mean of its prompt, divided by the population's deviation + 1e-4. So the scale of a score does not change the effect
    of its weight if its deviation is far above 1e-4; :func:`floor_share` is the loss of other scores. Only valid
    samples count. :func:`group_advantages` with ``global_std`` then divides by the deviation over the iteration.
    Source: GDPO, arXiv:2601.05242.
    """
    columns: dict[str, np.ndarray] = {}
    for name, weight in weights.items():
        rewards = rewards_of(samples, f"score.{name}")
        columns[f"reward.{name}"] = weight * group_advantages(
            rewards, samples["prompt_id"].to_numpy(), min_group_size=1, global_std=False, ddof=0
        )
    return samples.assign(**columns, reward=np.sum([*columns.values()], axis=0))


def _filled(rewards: np.ndarray) -> np.ndarray:
    # The mean distance from the lowest reward is exact if rewards are equal; a plain mean may differ by rounding.
    low = np.nanmin(rewards)
    return np.where(np.isnan(rewards), low + np.nanmean(rewards - low), rewards)


def _deviation(rewards: np.ndarray, ddof: int) -> float:
    """Return the standard deviation; NaN if there are not more than ``ddof`` rewards."""
    return float(rewards.std(ddof=ddof)) if len(rewards) > ddof else np.nan
