"""Stages as steps of a real Slurm, whose flow dies, whose job is lost, whose time is over."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ConfigError, StageError
from flows import launchers
from flows.launchers._base import Job
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of, standing_manifest
from tests.flows import slurm
from tests.flows.allocated import Work, plant, wait_until

pytestmark = [slurm.needs_slurm, pytest.mark.xdist_group("slurm"), pytest.mark.processes]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Slurm's commands find it by the environment."""
    with slurm.running(tmp_path_factory.mktemp("slurm")) as conf, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(conf))
        yield


@pytest.fixture
def work(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    """Nothing of a test is left for the next."""
    yield Work(tmp_path, monkeypatch)
    slurm.cancel_all()


def config(**options: Any) -> LaunchConfig:
    """Of a cluster that answers at once."""
    return LaunchConfig.model_validate(
        {"launcher": "slurm", "environment": {"ASKED_FOR": "this"}, "slurm": {"query_s": 0.2} | options}
    )


def start_flow(work: Work, config: LaunchConfig, *names: str) -> "subprocess.Popen[bytes]":
    """In a process that can be killed."""
    requests = [work.request(name).model_dump_json() for name in names]
    command = [sys.executable, "-m", "tests.flows.allocated", work.run_url, config.model_dump_json()]
    return subprocess.Popen([*command, *requests], cwd=ROOT)


def test_stages_share_one_held_job_unless_they_ask_for_another_partition(work: Work) -> None:
    work.go()
    launcher = work.launcher(config(partition="main"))
    for name in "ab":
        launcher.make("wave", [work.request(name)])
    (job,) = slurm.jobs()
    assert job[2:] == ["main", "RUNNING"]
    assert {(name, number) for name, number, *_ in work.ran()} == {(name, job[0]) for name in "ab"}
    assert Artifact(input_of(work.request("a").slot)).json("done.json") == "this"
    (log,) = Path(work.request("a").slot, "logs").iterdir()
    assert "at work" in log.read_text()

    elsewhere = work.launcher(config(partition="main", stages={"report": {"partition": "other"}}))
    elsewhere.make("third", [work.request("d")])
    assert work.ran()[-1][2] == "other"
    assert len(slurm.jobs()) == 2
    for one in (launcher, elsewhere):
        one.close()
    assert not slurm.jobs()


@pytest.mark.parametrize("site", ["ALL", "NONE"])
def test_stages_have_what_they_need_of_the_flows_environment_and_no_file_has_its_values(
    site: str, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = plant(monkeypatch)
    plain = {"COSMOS_RL_CACHE_GB": "5", "COSMOS_RL_S3_PROFILES": "s3://bucket=theirs", "HF_HUB_OFFLINE": "1"}
    for name, value in {**plain, "SBATCH_EXPORT": site, "OTHER": "x"}.items():
        monkeypatch.setenv(name, value)
    work.go()
    launcher = work.launcher(config().model_copy(update={"environment": {"PYTHONPATH": os.environ["PYTHONPATH"]}}))
    launcher.make("wave", [work.request("a")])
    found = Artifact(input_of(work.request("a").slot)).json("environment.json")
    expected = {name: hashlib.sha256(value.encode()).hexdigest() for name, value in (planted | plain).items()}
    assert expected.items() <= found.items()
    assert ("OTHER" in found) == (site == "ALL")
    script = slurm.script_of(slurm.jobs()[0][0])
    assert all(name in script for name in expected)
    written = [path.read_bytes() for path in work.folder.rglob("*") if path.is_file()] + [script.encode()]
    assert not [name for name, value in planted.items() if any(value.encode() in data for data in written)]
    launcher.close()


def test_a_flow_that_is_killed_leaves_its_stage_to_the_next_one(work: Work) -> None:
    flow = start_flow(work, config(), "a", "b")
    work.wait_until_ran(2)
    flow.kill()
    flow.wait()
    (job,) = slurm.jobs()
    began = sorted(work.ran())
    launcher = work.launcher(config())
    work.go()
    launcher.make("again", [work.request("b"), work.request("a")])
    assert sorted(work.ran()) == began
    assert [found[0] for found in slurm.jobs()] == [job[0]]
    assert all(standing_manifest(work.request(name)) for name in "ab")
    # A third flow finds nothing to do; it gives back what is left of the others all the same.
    work.launcher(config()).close()
    assert not slurm.jobs()


def test_with_a_job_a_stage_one_that_was_submitted_and_not_written_down_is_found_by_name(work: Work) -> None:
    alone = config(hold=False)
    job = Job(work.request("a"), work.launcher(alone).execution_of(work.request("a")))
    launchers.load(work.run_url, alone).submit(job)
    ((number, name, *_),) = slurm.jobs()
    assert name == job.name
    work.go()
    work.launcher(alone).make("again", [work.request("a")])
    assert [[number, "main"]] == [line[1:3] for line in work.ran()]
    assert standing_manifest(work.request("a"))
    assert not slurm.jobs()
    assert not list((work.folder / "run" / "allocations").iterdir())


def test_an_interrupted_flow_leaves_no_step_and_no_job(work: Work) -> None:
    def interrupt() -> None:
        work.wait_until_ran(1)
        os.kill(os.getpid(), signal.SIGINT)

    # A shell that starts the tests in the background has them ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    launcher = work.launcher(config())
    try:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                launcher.make("wave", [work.request("a")])
    finally:
        signal.signal(signal.SIGINT, before)
    ((*_, pid),) = work.ran()
    assert not psutil.pid_exists(int(pid))
    assert slurm.jobs()
    launcher.close()
    assert not slurm.jobs()
    assert standing_manifest(work.request("a")) is None


@pytest.mark.slow
def test_a_held_job_outlives_a_cancelled_stage_and_a_failed_one_but_not_the_flow(work: Work) -> None:
    held = config(idle_s=5.0)
    jobs = launchers.load(work.run_url, held)
    first = jobs.submit(Job(work.request("a")))
    ((_, number, _, pid),) = work.wait_until_ran(1)
    first.cancel()
    assert not psutil.pid_exists(int(pid))
    assert [job[0] for job in slurm.jobs()] == [number]
    (work.folder / "fail").touch()
    work.go()
    with pytest.raises(StageError, match="it does not fit") as error:
        work.launcher(held).make("wave", [work.request("b")])
    # The stage's own word, not what torchrun or srun makes of it.
    assert error.value.kind == "out_of_memory"
    assert work.ran()[-1][1] == number
    # Neither of these flows says anything any more, nor gives anything back.
    wait_until(lambda: not slurm.jobs())


def test_a_lost_job_is_worth_another_try_and_gets_another_job(work: Work) -> None:
    launcher = work.launcher(config())
    with ThreadPoolExecutor(1) as thread:
        making = thread.submit(launcher.make, "first", [work.request("a")])
        work.wait_until_ran(1)
        slurm.cancel_all()
        with pytest.raises(StageError, match="CANCELLED") as error:
            making.result()
    assert error.value.kind == "killed"
    work.go()
    launcher.make("again", [work.request("a")])
    first, again = [line[1] for line in work.ran()]
    assert first != again == slurm.jobs()[0][0]
    launcher.close()


@pytest.mark.slow
def test_a_stage_killed_on_its_node_was_killed(work: Work) -> None:
    launcher = work.launcher(config())
    jobs = launchers.load(work.run_url, config())
    submitted = jobs.submit(Job(work.request("a"), launcher.execution_of(work.request("a"))))
    ((*_, pid),) = work.wait_until_ran(1)
    os.kill(int(pid), signal.SIGKILL)
    with pytest.raises(StageError, match="killed") as error:
        launcher.make("wave", [work.request("a")])
    assert error.value.kind == "killed"
    assert submitted
    launcher.close()


def test_what_slurm_refuses_is_a_mistake_of_the_settings(work: Work) -> None:
    launcher = work.launcher(config(partition="nowhere"))
    with pytest.raises(ConfigError, match="invalid partition"):
        launcher.make("wave", [work.request("a")])
    assert not slurm.jobs()


@pytest.mark.slow
def test_a_job_whose_time_is_over_is_worth_another_try(work: Work) -> None:
    launcher = work.launcher(config(time_limit_min=1))
    began_s = time.monotonic()
    with pytest.raises(StageError, match="TIMEOUT") as error:
        launcher.make("wave", [work.request("a")])
    assert error.value.kind == "killed"
    assert error.value.retryable
    assert time.monotonic() - began_s > 50
    launcher.close()
