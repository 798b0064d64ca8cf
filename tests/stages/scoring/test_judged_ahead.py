"""Scores by a reward with torch of a rollout that is still being made: the stage takes them, and no bit is another."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.rewards import clip_score
from flows.devices import devices, locks
from flows.devices.devices import Need, need_of, taken_now
from flows.launchers._base import Job
from flows.launchers.overlap import EarlyScoring
from stages import contracts
from stages.artifacts.request import Request
from stages.execution.execution import Execution
from stages.execution.outcome import Outcome
from stages.execution.runner import execute
from tests import tiny_scorers
from tests.stages.scored_ahead import UNITS, Both, Turns, eventually
from tests.stages.scoring.test_scored_ahead import require_rest_after_a_kill
from tests.stages.test_reward import table_of


class Judged(Both):
    """A rollout and its scoring by a tiny CLIP."""

    def __init__(self, folder: Path) -> None:
        settings = tiny_scorers.settings("clip_score", folder / "clip")
        super().__init__(folder, clip_score.Options.model_validate({"name": "clip_score"} | settings))

    def request(self, slot: str = "reward", *, expected: bool = False) -> Request:
        light = super().request(slot, expected=expected)
        settings = ("reward", "scorer", "max_attempts", "max_failed_fraction")
        config = contracts.Judge(**{name: getattr(light.config, name) for name in settings})
        return Request(stage="judge", slot=light.slot, iteration=0, seed=0, config=config, inputs=light.inputs)


def test_scores_judged_ahead_have_the_bytes_of_a_stage_after_the_rollout(tmp_path: Path):
    both = Judged(tmp_path)
    both.score_ahead(0, 2, 1)
    assert len(both.shards) == 3
    both.require_equal(3, UNITS)
    assert both.shards == []


def test_judging_that_is_killed_goes_on_with_the_rest_when_started_again(tmp_path: Path):
    require_rest_after_a_kill(Judged(tmp_path), tmp_path)


def test_only_the_new_pictures_of_a_rollout_that_begins_again_are_judged(tmp_path: Path):
    both = Judged(tmp_path)

    def again() -> None:
        both.rollout.begin(pictures=1)
        both.rollout.finish(1)

    both.ahead.run(Turns(tmp_path / "ahead", partial(both.rollout.finish, 0), again, both.rollout.rest))
    assert len(both.shards) == 2
    both.require_equal(2, UNITS)


@pytest.mark.processes
def test_ranks_share_the_samples_on_locked_devices_and_may_be_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(locks, "LOCKS", tmp_path / "locks")
    both, notes, named = Judged(tmp_path), list[str](), ["GPU-a", "GPU-b", "GPU-c"]
    launch = LaunchConfig.model_validate({"stage_processes": {"judge": 2}, "device": "cpu"})
    rollout = taken_now(Need("rollout", 1), named)
    share = taken_now(need_of("judge", launch), named)
    assert rollout is not None
    assert share is not None
    assert {*rollout.devices, *share.devices} == {*named}
    execution = Execution(parallelism=launch.parallelism_of("judge"), device="cpu")
    for number in (0, 1):
        both.rollout.finish(number)
    job = Job(both.request(expected=True), execution)
    with EarlyScoring(both.rollout.request, job, launch, notes.append, share) as early:
        eventually(lambda: len(both.shards) == 2 or not early.is_running())
        assert notes == []
        assert early.has_begun
        assert taken_now(Need("judge", 1), named) is None
        os.kill(early.pid or 0, signal.SIGKILL)
        eventually(lambda: not early.is_running())
    assert notes == ["reward: scoring while the rollout runs ended (killed, exit code -9); the stage scores the rest"]
    eventually(lambda: len(devices.users(named)) == 0)
    again = taken_now(Need("judge", 2), named)
    assert again is not None
    for one in (rollout, again):
        one.file.close()
    both.rollout.rest()
    # The numerics name the ranks: scores of two are not taken by a stage of one, and its bytes are the same.
    both.require_equal(0, UNITS)


def test_the_stage_of_one_rank_scores_what_is_left(tmp_path: Path):
    both: Any = Judged(tmp_path)
    both.score_ahead(0)
    request = both.request()
    execute(request, Execution(), Outcome(tmp_path / "outcome", 0))
    assert len(table_of(request.slot, contracts.Judge.CALLS)["failed"]) == UNITS
