"""An order on several nodes fails on one of them first, and for a reason that another one tells later."""

import secrets
from pathlib import Path

import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from flows.launchers import _allocations
from flows.launchers._allocations import AllocatedJobs, Allocation
from flows.launchers._base import Job, JobState
from stages.artifacts.request import Request
from stages.contracts import Embed, ModelRef
from stages.execution.outcome import Failure, Outcome, read_failures
from tests.flows.allocated import wait_until

LOST_A_RANK = Failure(kind="crash", message="Connection closed by peer", retryable=True, collective=True)
DOES_NOT_FIT = Failure(kind="out_of_memory", message="it does not fit", retryable=True)


class TwoNodes:
    """A scheduler that gives every allocation at once; what its agents write is up to a test."""

    agents_per_node = True

    def __init__(self) -> None:
        self.phase = "running"

    def find(self, allocation: Allocation) -> str | None:
        return None

    def start(self, allocation: Allocation) -> str:
        return allocation.name

    def state(self, allocation: Allocation) -> JobState:
        return JobState("ended", kind="killed") if self.phase == "ended" else JobState("running")

    def end(self, allocation: Allocation) -> None:
        self.phase = "ended"

    def command(self, job: Job, allocation: Allocation, order: str) -> list[str]:
        return ["true"]


class Started:
    """One order on two nodes of such a scheduler."""

    def __init__(self, folder: Path) -> None:
        config = LaunchConfig.model_validate(
            {"launcher": "slurm", "processes": 2, "slurm": {"nodes": 2, "query_s": 0.1}}
        )
        self.scheduler, run_url = TwoNodes(), str(folder / secrets.token_hex(4))
        jobs = AllocatedJobs(run_url, config, f"{run_url}/allocations", self.scheduler)
        embed = Embed(model=ModelRef(path="x", adapter="x", digest="x"), prompts=(), max_prompt_length=1)
        request = Request(stage="embed", slot=f"{run_url}/embed", seed=0, config=embed)
        self.job = jobs.submit(Job(request))
        self.folder = self.job.directory
        self.folder.mkdir(parents=True, exist_ok=True)

    def ends_on(self, node: int, code: int) -> None:
        (self.folder / f"returncode.{node}").write_text(str(code), encoding="utf-8")

    def fails(self, rank: int, failure: Failure) -> None:
        Outcome(self.folder, rank).failed(failure)

    def state(self) -> JobState:
        return self.job.poll()

    def ended(self) -> int | None:
        wait_until(lambda: self.state().phase == "ended")
        return self.state().exit_code


@pytest.fixture
def started(tmp_path: Path) -> Started:
    return Started(tmp_path)


def still_runs(started: Started, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a poll that looks at once finds that it runs."""
    monkeypatch.setattr(_allocations, "LOOK_S", 0.0)
    return started.state().phase == "running"


def test_the_reason_of_a_slower_node_is_waited_for(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    started.fails(0, LOST_A_RANK)
    started.ends_on(0, 1)
    assert still_runs(started, monkeypatch)
    started.fails(1, DOES_NOT_FIT)
    assert started.ended() == 1
    assert [failure.kind for failure in read_failures(started.folder)] == ["out_of_memory", "crash"]


def test_a_reason_that_is_known_is_not_waited_for(started: Started) -> None:
    started.fails(0, DOES_NOT_FIT)
    started.ends_on(0, 1)
    assert started.ended() == 1


def test_a_node_that_was_killed_tells_more_than_one_that_lost_it(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    started.fails(0, LOST_A_RANK)
    started.ends_on(0, 1)
    assert still_runs(started, monkeypatch)
    started.ends_on(1, -9)
    assert started.ended() == -9


def test_a_node_that_tells_nothing_is_not_waited_for_for_long(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_allocations, "REASON_TIMEOUT_S", 0.5)
    started.ends_on(1, 1)
    assert still_runs(started, monkeypatch)
    assert started.ended() == 1


def test_an_allocation_that_is_gone_is_not_waited_for(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    started.fails(0, LOST_A_RANK)
    started.ends_on(0, 1)
    assert still_runs(started, monkeypatch)
    started.scheduler.phase = "ended"
    assert started.ended() == 1
