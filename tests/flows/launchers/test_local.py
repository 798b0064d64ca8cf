"""Stages on this machine: how their flow sees that they have ended."""

import select
from contextlib import closing
from pathlib import Path
from typing import Literal

import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from flows.devices.waiting import Waiting
from flows.launchers._base import Job
from flows.launchers.local import JobLauncher
from stages.artifacts.slots import current_manifest
from tests.flows.allocated import PATIENCE_S, Work

pytestmark = pytest.mark.processes


def test_a_fork_that_ends_wakes_its_flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(tmp_path, monkeypatch)
    request = work.request("a")
    with closing(JobLauncher(work.run_url, LaunchConfig(mode="warm"))) as jobs:
        with jobs.reserve([request], Waiting([].append, lambda: None)):
            job = jobs.submit(Job(request))
        work.wait_until_ran(1)
        assert select.select(jobs.replies(), [], [], 0.2)[0] == []
        work.go()
        assert select.select(jobs.replies(), [], [], PATIENCE_S)[0] != []
        assert job.poll().exit_code == 0
        # The reply was read.
        assert select.select(jobs.replies(), [], [], 0.2)[0] == []
        job.discard()


@pytest.mark.parametrize("mode", ["cold", "warm"])
def test_a_job_that_made_its_flow_a_rank_makes_no_stage_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Literal["cold", "warm"]
) -> None:
    work = Work(tmp_path, monkeypatch)
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    work.go()
    request = work.request("a")
    with closing(work.launcher(LaunchConfig(mode=mode))) as waves:
        waves.make("a", [request])
    assert current_manifest(request) is not None
