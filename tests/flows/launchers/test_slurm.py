"""Stages as steps of a job of a real Slurm: their ends, the end of their flow, and what cannot work."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ConfigError, StageError
from flows import launchers
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import current_manifest, input_of
from tests.flows import slurm
from tests.flows.allocated import Work, wait_until

pytestmark = [slurm.needs_slurm, pytest.mark.xdist_group("slurm"), pytest.mark.processes]
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A job of two nodes, on the first of which this process seems to run."""
    with slurm.running(tmp_path_factory.mktemp("slurm")) as conf, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(conf))
        with slurm.allocation(2) as variables:
            for name, value in variables.items():
                patch.setenv(name, value)
            yield variables["SLURM_JOB_ID"]


@pytest.fixture
def work(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    """Nothing of a test is left for the next."""
    yield Work(tmp_path, monkeypatch)
    wait_until(lambda: not slurm.steps(job))


def config(**options: Any) -> LaunchConfig:
    return LaunchConfig.model_validate({"launcher": "slurm", "environment": {"ASKED_FOR": "this"}} | options)


def left_in(work: Work) -> list[Path]:
    """Folders of steps that nobody deleted."""
    return list((work.folder / "run" / "steps").iterdir())


def test_a_stage_is_a_step_on_the_first_node_with_the_flows_environment(work: Work, job: str) -> None:
    work.go()
    launcher = work.launcher(config())
    for name in "ab":
        launcher.make("wave", [work.request(name)])
        assert Artifact(input_of(work.request(name).slot)).json("done.json") == "this"
    assert [(name, number) for name, number, *_ in work.ran()] == [("a", job), ("b", job)]
    (log,) = Path(work.request("a").slot, "logs").iterdir()
    assert "at work" in log.read_text()
    launcher.close()
    assert not left_in(work)


def test_stages_of_a_wave_run_side_by_side(work: Work, job: str) -> None:
    with ThreadPoolExecutor(1) as thread:
        making = thread.submit(work.launcher(config()).make, "wave", [work.request("a"), work.request("b")])
        work.wait_until_ran(2)
        assert len(slurm.steps(job)) == 2
        work.go()
        making.result()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_flow_that_ends_leaves_no_step_and_the_same_command_continues(
    number: signal.Signals, work: Work, job: str
) -> None:
    command = [sys.executable, "-m", "tests.flows.allocated", work.run_url, config().model_dump_json()]
    flow = subprocess.Popen([*command, work.request("a").model_dump_json()], cwd=ROOT)
    ((*_, pid),) = work.wait_until_ran(1)
    flow.send_signal(number)
    flow.wait()
    wait_until(lambda: not psutil.pid_exists(int(pid)))
    wait_until(lambda: not slurm.steps(job))
    assert current_manifest(work.request("a")) is None
    work.go()
    work.launcher(config()).make("again", [work.request("a")])
    assert current_manifest(work.request("a")) is not None


def test_an_interrupted_wave_leaves_no_step(work: Work, job: str) -> None:
    def interrupt() -> None:
        work.wait_until_ran(1)
        os.kill(os.getpid(), signal.SIGINT)

    # A shell that starts the tests in the background has them ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                work.launcher(config()).make("wave", [work.request("a")])
    finally:
        signal.signal(signal.SIGINT, before)
    ((*_, pid),) = work.ran()
    assert not psutil.pid_exists(int(pid))
    assert not left_in(work)


def test_a_stage_that_is_killed_or_fails_tells_its_own_reason(work: Work) -> None:
    launcher = work.launcher(config())
    with ThreadPoolExecutor(1) as thread:
        making = thread.submit(launcher.make, "wave", [work.request("a")])
        ((*_, pid),) = work.wait_until_ran(1)
        os.kill(int(pid), signal.SIGKILL)
        with pytest.raises(StageError, match="killed") as error:
            making.result()
    assert (error.value.kind, error.value.retryable) == ("killed", True)
    (work.folder / "fail").touch()
    work.go()
    with pytest.raises(StageError, match="it does not fit") as error:
        launcher.make("wave", [work.request("b")])
    assert error.value.kind == "out_of_memory"


def test_only_a_flow_on_the_first_node_of_a_job_with_enough_nodes_starts(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three = config(processes=3, slurm={"nodes": 3})
    with pytest.raises(ConfigError, match=rf"a stage needs 3 nodes, the Slurm job {job} has 2"):
        launchers.load(str(tmp_path), three)
    with pytest.raises(ConfigError, match=r"launch\.slurm\.work_dir"):
        launchers.load("s3://bucket/runs/r", config())
    assert launchers.load("s3://bucket/runs/r", config(slurm={"work_dir": str(tmp_path)}))
    monkeypatch.setenv("SLURM_NODEID", "1")
    with pytest.raises(ConfigError, match=r"SLURM_NODEID = 1\)\. Submit a batch script"):
        launchers.load(str(tmp_path), config())
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(ConfigError, match="SLURM_JOB_ID = None"):
        launchers.load(str(tmp_path), config())
