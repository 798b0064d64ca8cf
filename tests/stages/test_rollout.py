"""Rollouts of videos, ``[C, T, H, W]``: the same bytes on any number of ranks, and what is stored."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from flows.planning import requests
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.formats.policies import read_part
from stages.formats.samples import read_samples
from stages.formats.tables import read_table
from tests.stages.conftest import make, make_on_ranks, make_run
from tests.stages.small_video import LORA, one_iteration, recipe


@pytest.mark.processes
def test_a_rollout_is_the_same_bytes_on_one_rank_and_on_four(wan_path: str, prompt_dir: str, tmp_path: Path):
    values = recipe(wan_path, prompt_dir, LORA)
    # Six shards: two ranks have one more than the others.
    values["rollout"]["samples_per_shard"] = 1
    run = make_run(tmp_path, values)
    for request in (partial(requests.policy, run), lambda: run.prepared.embed, partial(requests.rollout, run, 0)):
        make(request(), tmp_path)
    alone = requests.rollout(run, 0)
    four = alone.model_copy(update={"slot": f"{alone.slot}-on-four-ranks"})
    assert make_on_ranks(four, tmp_path, 4).content == input_of(alone.slot).content


def test_a_rollout_stores_the_pixels_that_are_scored_and_their_latents(wan_path: str, prompt_dir: str, tmp_path: Path):
    run = make_run(tmp_path, recipe(wan_path, prompt_dir, LORA))
    one_iteration(run, tmp_path, ranks=1)
    artifact = Artifact(input_of(run.slots.iteration(0, "rollout")))
    stored = list(read_samples(artifact))
    assert [s.pixels.shape for s in stored] == [(5, 16, 16, 3)] * 6
    assert {s.extension for s in stored} == {"mkv"}
    assert len({s.row["seed"] for s in stored}) == 6
    assert {s.row["policy"] for s in stored} == {input_of(run.slots.policy(0), "old").content}

    update = Artifact(input_of(run.slots.policy(1)))
    advantages = read_table(update, "advantages.parquet")
    # NFT: rewards minus their group's mean over the deviation of all, plus 1e-4.
    rewards = advantages["reward"].to_numpy().reshape(2, 3)
    expected = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std() + 1e-4)
    np.testing.assert_allclose(advantages["advantage"].to_numpy().reshape(2, 3), expected, rtol=1e-12)
    metrics = read_table(update, "metrics.parquet")
    assert metrics["step"].tolist() == [0, 1]
    # Old and reference equal current before the first step moves it.
    old_deviations, distances = metrics["old_deviation"].tolist(), metrics["kl"].tolist()
    assert old_deviations[0] == 0
    assert distances[0] == 0
    assert old_deviations[1] > 0
    names = read_part(input_of(run.slots.policy(0)), "current")
    assert {f"step.{name}" for name in names} <= read_part(input_of(run.slots.policy(1)), "optimizer").keys()
