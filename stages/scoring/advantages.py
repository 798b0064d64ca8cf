"""Advantages of the samples of rollouts, from their scores, without torch: what an update trains on."""

from typing import cast

import numpy as np
import pandas as pd

from cosmos_rl_core import seeds
from cosmos_rl_core.algorithms._base import Algorithm
from cosmos_rl_core.errors import ArtifactError, ConfigError
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.formats.samples import key_of
from stages.scoring.rewards import rewarded


def advantages(request: Request, rollouts: list[Artifact], algorithm: Algorithm) -> pd.DataFrame:
    """Return every sample of the rollouts with its reward, its advantage and whether it is used.

    Columns ``rollout`` (its content) and ``sample_id`` name a sample; ``key`` is its name in this update. Means,
    deviations and shuffled rewards are each within one rollout.
    """
    tables: list[pd.DataFrame] = []
    for place, rollout in enumerate(rollouts):
        table = _advantages_of(rewarded(request, rollout), request, algorithm, place)
        table.insert(0, "rollout", rollout.manifest.content)
        tables.append(table.assign(key=[key_of(place, one) for one in table["sample_id"]]))
    found = pd.concat(tables, ignore_index=True)
    if not any(found["used"]):
        raise ArtifactError("no sample can be trained on: no group has min_group_size scored samples")
    return found


def _advantages_of(samples: pd.DataFrame, request: Request, algorithm: Algorithm, place: int) -> pd.DataFrame:
    """Return the samples of one rollout with ``advantage`` and ``used``."""
    finite, samples = samples["finite"], samples.drop(columns="finite")
    scored = [name for name in samples.columns if name not in ("sample_id", "prompt_id")]
    trainable = cast("pd.DataFrame", samples[finite]).reset_index(drop=True)
    if request.settings(contracts.Update).algorithm.shuffle_rewards:
        key = (request.seed, "shuffled rewards", request.iteration or 0, place)
        order = seeds.permutation(len(trainable), *key)
        trainable[scored] = trainable[scored].iloc[order].reset_index(drop=True)
    table = algorithm.advantages(trainable)
    broken = table["used"].to_numpy(bool) & ~np.isfinite(table["advantage"].to_numpy(np.float64))
    if broken.any():
        name, ids = request.settings(contracts.Update).algorithm.type, ", ".join(table.loc[broken, "sample_id"])
        raise ConfigError(
            f"algorithm {name!r} uses samples whose advantage is not finite: {ids}; mend its advantages()"
        )
    if not bool(finite.all()):
        # A sample that is not finite is never trained on, whatever the shuffled rewards are.
        trained = table.drop(columns="prompt_id")
        table = samples.drop(columns=scored).merge(trained, on="sample_id", how="left")
        table["used"] = table["used"].eq(True)
    return table
