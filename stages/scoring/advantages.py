"""Advantages of the samples of rollouts, from their scores, without torch: what an update trains on."""

from typing import cast

import numpy as np
import pandas as pd

from cosmos_rl_core import seeds
from cosmos_rl_core.algorithms._advantages import BEATS, DROPPED
from cosmos_rl_core.algorithms._base import Algorithm
from cosmos_rl_core.errors import ArtifactError, ConfigError
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.formats.samples import key_of, place_of
from stages.scoring.rewards import held_back_prompts, rewarded

PAIRS, PAIRS_DROPPED, PAIRS_ELSEWHERE = "pairs", "pairs_dropped", "pairs_elsewhere"
"""Keys of the summary, if there are pairs: how many were trained on, how many were left out, and how many of the given
pairs are of other rollouts."""


def advantages(request: Request, rollouts: list[Artifact], algorithm: Algorithm) -> pd.DataFrame:
    """Return every sample of the rollouts with its reward, its advantage and whether it is used.

    Columns ``rollout`` (its content) and ``sample_id`` name a sample; ``key`` is its name in this update. Means,
    deviations and shuffles are within one rollout. Raises :class:`ArtifactError` if no sample is used.
    """
    tables: list[pd.DataFrame] = []
    for place, rollout in enumerate(rollouts):
        table = _advantages_of(rewarded(request, rollout), request, algorithm, place)
        table.insert(0, "rollout", rollout.manifest.content)
        tables.append(table.assign(key=[key_of(place, one) for one in table["sample_id"]]))
    found = pd.concat(tables, ignore_index=True)
    if not any(found["used"]) and BEATS in found:
        dropped = counts_of(found, algorithm)[PAIRS_DROPPED]
        raise ArtifactError(
            f"no pair can be trained on: {dropped} were left out, because their rewards are equal or nearly so, "
            "and other prompts have fewer than two scored samples; look at the scores"
        )
    if not any(found["used"]):
        raise ArtifactError(
            "no sample can be trained on: no prompt has min_group_size scored samples; look at the scores"
        )
    return found


def units_of(table: pd.DataFrame, algorithm: Algorithm) -> list[tuple[str, ...]]:
    """Return the units that are trained on, each as the keys of its samples, in the order of :func:`advantages`."""
    if algorithm.needs.unit == "sample":
        return [(key,) for key in table.loc[table["used"], "key"]]
    winners = cast("pd.DataFrame", table.loc[table["used"], ["key", BEATS]])
    return [
        (key, key_of(place_of(key)[0], loser))
        for key, losers in winners.itertuples(index=False, name=None)
        for loser in losers.split()
    ]


def counts_of(table: pd.DataFrame, algorithm: Algorithm) -> dict[str, int]:
    """Return the counts of excluded samples, held-back prompts and pairs, by their keys in an update's summary."""
    counts = {
        "excluded": len(table[~table["used"]]),
        contracts.Update.HELD_BACK: held_back_prompts(table),
    }
    if BEATS not in table:
        return counts
    pairs = sum(len(losers.split()) for losers in table.loc[table["used"], BEATS])
    dropped = int(np.nansum(table[DROPPED].to_numpy(np.float64)))
    elsewhere = max(0, algorithm.needs.given_pairs - pairs - dropped)
    return counts | {PAIRS: pairs, PAIRS_DROPPED: dropped, PAIRS_ELSEWHERE: elsewhere}


def _advantages_of(samples: pd.DataFrame, request: Request, algorithm: Algorithm, place: int) -> pd.DataFrame:
    """Return the samples of one rollout with ``advantage`` and ``used``."""
    finite, samples = samples["finite"], samples.drop(columns="finite")
    scored = [name for name in samples.columns if name not in ("sample_id", "prompt_id")]
    trainable = cast("pd.DataFrame", samples[finite]).reset_index(drop=True)
    if request.settings(contracts.Update).algorithm.shuffle_rewards:
        key = (request.seed, "shuffled rewards", request.iteration or 0, place)
        order = seeds.permutation(len(trainable), *key)
        trainable[scored] = trainable[scored].iloc[order].reset_index(drop=True)
    if (number := request.settings(contracts.Update).algorithm.shuffle_groups) > 0:
        key = (request.seed, "shuffled groups", number, request.iteration or 0, place)
        trainable = _shuffled_in_groups(trainable, scored, key)
    table = algorithm.advantages(trainable)
    _check_table(table, trainable, request.settings(contracts.Update).algorithm.type)
    broken = table["used"].to_numpy(bool) & ~np.isfinite(table["advantage"].to_numpy(np.float64))
    if broken.any():
        name, ids = request.settings(contracts.Update).algorithm.type, ", ".join(table.loc[broken, "sample_id"])
        raise ConfigError(
            f"algorithm {name!r} uses samples whose advantage is not finite: {ids}; mend its advantages()"
        )
    if algorithm.needs.unit == "pair":
        _check_pairs(table, request.settings(contracts.Update).algorithm.type)
    if not bool(finite.all()):
        # A sample that is not finite is never trained on, whatever the shuffled rewards are.
        trained = table.drop(columns="prompt_id")
        table = samples.drop(columns=scored).merge(trained, on="sample_id", how="left")
        table["used"] = table["used"].eq(True)
    return table


def _shuffled_in_groups(samples: pd.DataFrame, scored: list[str], key: tuple[int | str, ...]) -> pd.DataFrame:
    """Return the samples with the columns ``scored`` in another order within each prompt."""
    order = np.arange(len(samples))
    for prompt, members in samples.groupby("prompt_id", sort=True).indices.items():
        order[members] = members[seeds.permutation(len(members), *key, str(prompt))]
    shuffled = samples[scored].iloc[order].reset_index(drop=True)
    return samples.assign(**{name: shuffled[name] for name in scored})


def _check_table(table: pd.DataFrame, given: pd.DataFrame, name: str) -> None:
    """Raise :class:`ConfigError` unless an algorithm's table has the given rows in order, and all its columns."""
    if missing := [column for column in ("advantage", "used") if column not in table]:
        raise ConfigError(f"algorithm {name!r}: advantages() must return the columns {', '.join(missing)}")
    if table["sample_id"].tolist() != given["sample_id"].tolist():
        raise ConfigError(
            f"algorithm {name!r}: advantages() returns {len(table)} rows for {len(given)} samples, or another order; "
            "expected a row for every sample, in order; used = False leaves a sample out"
        )


def _check_pairs(table: pd.DataFrame, name: str) -> None:
    """Raise :class:`ConfigError` unless exactly the samples that an algorithm uses are in its pairs."""
    if missing := [column for column in (BEATS, DROPPED) if column not in table]:
        raise ConfigError(f"algorithm {name!r} trains on pairs: its advantages() must return {', '.join(missing)}")
    prompt_of = dict(zip(table["sample_id"], table["prompt_id"], strict=True))
    paired: set[str] = set()
    for winner, losers in zip(table["sample_id"], table[BEATS].str.split(), strict=True):
        if wrong := [one for one in losers if one == winner or prompt_of.get(one) != prompt_of[winner]]:
            raise ConfigError(
                f"algorithm {name!r} pairs {winner} with {', '.join(wrong)}; expected other samples of its prompt that "
                "are finite; mend its advantages()"
            )
        paired.update(losers, [winner] * bool(losers))
    if unlike := sorted(paired ^ {*table.loc[table["used"], "sample_id"]}):
        raise ConfigError(
            f"algorithm {name!r}: samples must be used if in a pair, and not otherwise; found {', '.join(unlike)}; "
            "mend its advantages()"
        )
