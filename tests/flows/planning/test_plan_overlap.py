"""Rewards that overlap with rollouts, as planned: what they are asked, and where they do not overlap."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.recipes.reading import check
from flows.devices.fitting import most, why_not_together
from flows.explaining.explain import explain_plan
from flows.planning import requests
from flows.planning.plan import Settings, plan_of
from tests.core.recipes.test_without_effect import recipe as values
from tests.hand_made import make, make_run, rollout_files

OVERLAP = ("[[rewards]]\n", "[[rewards]]\noverlap = true\n")
SLURM = ("[early_warning]\n", '[launch]\nlauncher = "slurm"\n\n[early_warning]\n')
Recipe = Callable[..., str]


def test_overlap_changes_no_digest_and_no_request(recipe: Recipe, tmp_path: Path):
    without = plan_of(Settings(recipe()))
    path = recipe(OVERLAP)
    plan = plan_of(Settings(path))
    assert (plan.run_id, plan.identity()) == (without.run_id, without.identity())

    run = make_run(path, tmp_path, iterations=0)
    rollout = requests.rollout(run, 0)
    (ahead,) = requests.rewards_ahead(run, rollout)
    assert requests.rewards_ahead(run, ahead) == []
    make(rollout, rollout_files(0))
    (reward,) = (r for r in run.scored if r.overlap)
    asked = requests.reward(run, reward, rollout.slot, 0)
    assert (ahead.slot, ahead.recipe, ahead.fingerprint) == (asked.slot, asked.recipe, asked.fingerprint)
    assert ahead.one("samples").content != asked.one("samples").content


def test_the_plan_says_which_rewards_overlap_and_where_none_can(recipe: Recipe):
    def lines(*changes: tuple[str, str]) -> list[str]:
        said = explain_plan(plan_of(Settings(recipe(*changes))), "outputs").splitlines()
        return [line for line in said if line.startswith("overlaps")]

    assert lines() == []
    assert lines(OVERLAP) == ["overlaps   ocr: scored while the rollout runs"]
    assert lines(OVERLAP, SLURM) == ["overlaps   nothing: with launcher = 'slurm', ocr begins after the rollout"]


def test_rewards_of_supervised_training_overlap_with_no_rollout():
    rewards = [{"fn": {"name": "jpeg"}, "overlap": True}]
    with pytest.raises(ConfigError, match=r"rewards \(jpeg\)\.overlap without effect: supervised training makes no"):
        check(values("sft", ("rewards", rewards)), "x.toml")


@pytest.mark.parametrize(
    ("launch", "says"),
    [
        ({"gpus": 3}, ""),
        ({"device": "cpu"}, ""),
        ({"gpus": 2}, r"rollout and judge need 3 GPUs together, and there are 2; show more, or use fewer processes"),
        ({"gpus": 3, "gpu_limit": "gpus"}, r"launch\.gpu_limit has slots for the stages of a wave only"),
        ({"stage_gpus": {"rollout": [0, 1], "judge": [1]}}, r"launch\.stage_gpus gives judge GPUs of another stage"),
        ({"stage_gpus": {"rollout": [0, 1], "judge": [2]}}, ""),
    ],
)
def test_a_reward_with_torch_overlaps_if_devices_are_left(launch: dict[str, object], says: str):
    config = LaunchConfig.model_validate({"stage_processes": {"rollout": 2}} | launch)
    why = why_not_together(["rollout", "judge"], config, most(config, None))
    assert re.match(says, why) if says else why == ""
    # With two of them, the second one needs a device of its own too.
    if launch == {"gpus": 3}:
        assert why_not_together(["rollout", "judge", "judge"], config, most(config, None)) != ""
