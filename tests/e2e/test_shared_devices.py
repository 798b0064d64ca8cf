"""Two whole runs on a machine with one device: each stage waits until the other run's stage has gone."""

import secrets
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from flows.devices import VISIBLE
from tests.e2e.flow_process import COLD, Flows, Started

TIMEOUT_S = 900.0
ONE_ITERATION = ("--iterations", "1", *COLD)


@pytest.fixture(params=["a server that both share", "a server each"])
def runs(request: pytest.FixtureRequest, tmp_path: Path) -> list[Flows]:
    """Two stores; their runs see one device, which is there in name only, so that stages compute on the CPU."""
    environment = {VISIBLE: f"GPU-{secrets.token_hex(8)}"}
    if request.param == "a server that both share":
        environment |= request.getfixturevalue("prefect_environment")
    else:
        environment["PREFECT_HOME"] = str(tmp_path / "prefect")
    return [Flows(tmp_path / name, environment) for name in ("one", "other")]


def with_device(flows: Flows) -> list[psutil.Process]:
    """Stage processes to which the device is shown."""
    found = []
    for process in flows.running("stages.runner"):
        try:
            if process.environ()[VISIBLE]:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def finish(started: list[Started], look: Callable[[], None]) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while any(run.process.poll() is None for run in started):
        assert time.monotonic() < end_s, [run.said for run in started]
        look()
        time.sleep(0.1)


@pytest.mark.slow
def test_no_stage_runs_beside_the_other_runs_stage_on_one_device(runs: list[Flows]) -> None:
    one, other = runs
    seen: set[int] = set()

    def look() -> None:
        mine = with_device(one)
        theirs = with_device(other)
        # Those that were there before the others were looked for, and still are.
        both = [process.pid for process in mine if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        assert not (both and theirs), (both, theirs)
        seen.update(process.pid for process in [*mine, *theirs])

    try:
        started = [flows.start(*ONE_ITERATION) for flows in runs]
        finish(started, look)
        said = [run.finish() for run in started]
    finally:
        for flows in runs:
            flows.kill_all()
    # Policy, embeddings, rollout, update and two exports or more, of each.
    assert len(seen) >= 10
    assert any("waits for 1 free GPUs" in " ".join(words.split()) for words in said)
    assert all(flows.nothing_is_left() for flows in runs)
