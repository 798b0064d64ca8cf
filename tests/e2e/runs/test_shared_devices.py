"""Two runs on a machine with one device: each stage waits until the other run's stage has gone, or its process that
stays."""

import secrets
import time
from pathlib import Path

import psutil
import pytest

from flows.devices.devices import VISIBLE
from tests.e2e.flow_process import COLD, Flows, Started

TIMEOUT_S = 600.0
WAITS = "waits for 1 free GPU"
STAGES = 3
"""Stages that each run makes before the result is believed."""
ON_CPU = ("--set", "launch.device=cpu", "--iterations", "100")
MODES = {
    "stages.execution.runner": (*COLD, *ON_CPU),
    "stages.execution.warm.resident": (*ON_CPU, "--set", "launch.resident_gb=1"),
}
"""How processes of stages start, by the module that they run."""


@pytest.fixture(params=["a server that both share", "a server each"])
def runs(request: pytest.FixtureRequest, tmp_path: Path) -> list[Flows]:
    """Two stores; their runs see one device, which is there in name only, so that stages compute on the CPU."""
    environment = {VISIBLE: f"GPU-{secrets.token_hex(8)}"}
    if request.param == "a server that both share":
        environment |= request.getfixturevalue("prefect_environment")
        return [Flows(tmp_path / name, environment) for name in ("one", "other")]
    return [Flows(tmp_path / name, environment | {"PREFECT_HOME": str(tmp_path / name)}) for name in ("one", "other")]


def with_device(flows: Flows, program: str) -> list[psutil.Process]:
    """Stage processes to which the device is shown."""
    found = []
    for process in flows.running(program):
        try:
            if process.environ()[VISIBLE]:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("program", MODES)
def test_no_two_stages_of_two_runs_share_a_device(runs: list[Flows], program: str) -> None:
    seen: list[set[int]] = [set(), set()]
    end_s = time.monotonic() + TIMEOUT_S
    try:
        started: list[Started] = []
        for flows in runs:
            started.append(flows.start(*MODES[program]))
            started[-1].wait_until(
                lambda flows=flows: with_device(flows, program) or "waits for 1 free GPU" in said(started[-1])
            )
        while min(map(len, seen)) < STAGES:
            assert time.monotonic() < end_s, [run.said for run in started]
            assert all(run.process.poll() is None for run in started), [run.said for run in started]
            mine, theirs = (with_device(flows, program) for flows in runs)
            # Those that were there before the others were looked for, and still are.
            both = [
                process.pid for process in mine if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
            ]
            assert not (both and theirs), (both, theirs)
            for found, processes in zip(seen, (mine, theirs), strict=True):
                found.update(process.pid for process in processes)
            time.sleep(0.05)
        assert any(WAITS in said(run) for run in started)
    finally:
        for flows in runs:
            flows.kill_all()
    assert all(flows.nothing_is_left() for flows in runs)


def said(run: Started) -> str:
    """The words of a run, in one line."""
    return " ".join(run.said.split())
