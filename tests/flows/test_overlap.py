"""Rewards that overlap with rollouts, as planned: what they are asked, and where they do not overlap."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.recipes.reading import check
from flows.describing.describe import describe_plan
from flows.planning import requests
from flows.planning.plan import Settings, plan_of
from tests.core.test_without_effect import recipe as values
from tests.hand_made import make, make_run, rollout_files

OVERLAP = ("[[rewards]]\n", "[[rewards]]\noverlap = true\n")
SLURM = ("[early_warning]\n", '[launch]\nlauncher = "slurm"\n\n[early_warning]\n')
Recipe = Callable[..., str]


def test_overlap_changes_no_digest_and_asks_for_what_the_stage_is_asked_for(recipe: Recipe, tmp_path: Path):
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
        said = describe_plan(plan_of(Settings(recipe(*changes))), "outputs").splitlines()
        return [line for line in said if line.startswith("overlaps")]

    assert lines() == []
    assert lines(OVERLAP) == ["overlaps   ocr: scored while the rollout runs"]
    assert lines(OVERLAP, SLURM) == ["overlaps   nothing: with launcher = 'slurm', ocr begins after the rollout"]


def test_a_reward_with_torch_waits_for_the_rollouts_devices():
    rewards = [{"fn": {"name": "jpeg"}}, {"fn": {"name": "clip_score"}, "role": "monitor", "overlap": True}]
    with pytest.raises(ConfigError, match=r"rewards \(clip_score\)\.overlap without effect: clip_score computes with"):
        check(values("nft", ("rewards", rewards)), "x.toml")
