"""Scoring of a rollout that is still being made, by a process of the launcher."""

import os
import signal
from pathlib import Path

import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from flows.launchers._base import Job
from flows.launchers.overlap import EarlyScoring
from tests.stages.scored_ahead import JPEG, UNITS, Both, eventually


@pytest.mark.processes
def test_a_killed_scoring_process_is_noted_once_and_ends_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    both, notes = Both(tmp_path, JPEG), list[str]()
    both.rollout.finish(0)
    reward = Job(both.request(expected=True))
    with EarlyScoring(both.rollout.request, reward, LaunchConfig(), notes.append) as early:
        eventually(lambda: both.shards or not early.is_running())
        assert early.is_running()
        assert early.pid is not None
        os.kill(early.pid, signal.SIGKILL)
        eventually(lambda: not early.is_running())
        assert not early.is_running()
    expected = "reward: scoring while the rollout runs ended (killed, exit code -9); the stage scores the rest"
    assert notes == [expected]
    both.rollout.rest()
    both.require_equal(1, UNITS)
