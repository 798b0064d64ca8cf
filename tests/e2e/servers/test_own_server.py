"""A command for which no Prefect server is configured: its own server ends with it, whichever way it ends."""

import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from flows.planning.plan import METRICS_FILE
from tests.e2e.flow_process import (
    FORK_SERVER,
    ITERATIONS,
    Flows,
    Started,
    metrics,
    require_same_run,
    require_untouched,
)

REWARD = "iterations/0001/reward-ocr"
SERVER = "prefect.server.api.server:create_app"
END_TIMEOUT_S = 20.0
ASK = """
import os, time, httpx
from flows.running.server import prefect_server

with prefect_server(), httpx.Client(base_url=os.environ["PREFECT_API_URL"]) as client:
    times = [time.monotonic()]
    for _ in range(60):
        client.get("/health").raise_for_status()
        times.append(time.monotonic())
print(min(after - before for before, after in zip(times[30:], times[31:])))
"""
"""Prints the shortest time in seconds of a late request: the system acknowledges the first ones of a connection at
once."""


@pytest.fixture(scope="package")
def own_prefect_home(prefect_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database that is there already, as on a laptop: making an empty one takes a server ten seconds."""
    home, name = tmp_path_factory.mktemp("own-prefect"), "prefect.db"
    made = sqlite3.connect(Path(prefect_environment["PREFECT_HOME"]) / name)
    with contextlib.closing(made), contextlib.closing(sqlite3.connect(home / name)) as copy:
        made.backup(copy)
    return home


def told_of_none(environment: Mapping[str, str], home: Path) -> dict[str, str]:
    """Variables without a server, not even one that the machine has: the tests would leave runs there."""
    told = {name: value for name, value in environment.items() if not name.startswith("PREFECT_")}
    return told | {"PREFECT_HOME": str(home)}


@pytest.fixture
def flows(reference: Flows, own_prefect_home: Path, tmp_path: Path) -> Iterator[Flows]:
    """A store of the test's own, with the finished run in it, and commands that are told of no server."""
    flows = Flows(tmp_path, {})
    flows.environment = told_of_none(flows.environment, own_prefect_home)
    shutil.copytree(reference.store, flows.store)
    yield flows
    flows.kill_all()


def started_inside_a_shard(flows: Flows) -> Started:
    """A warm command with its server, its fork server and a fork that works."""
    run = flows.start(process_group=0)
    run.wait_until(lambda: flows.markers(REWARD, 0))
    assert len(flows.running(SERVER)) == 1
    assert len(flows.running(FORK_SERVER)) == 2
    return run


def require_end(run: Started) -> None:
    """It ends soon, and says that it did not do its work."""
    try:
        assert run.process.wait(END_TIMEOUT_S) != 0, run.said
    except subprocess.TimeoutExpired:
        pytest.fail(f"it did not end within {END_TIMEOUT_S} s:\n{run.said}")


def require_the_same_command_goes_on(flows: Flows, before: dict[str, bytes], reference: Flows) -> None:
    """Nothing was committed by what was ended, and another try gives the bytes of a run that nobody interrupted."""
    assert flows.manifests() == before
    assert "of an earlier attempt adopted" in flows.run()
    require_untouched(flows, before)
    require_same_run(flows, reference)
    assert flows.nothing_is_left()
    assert list(flows.temporary.glob("cosmos-flows-*")) == []


def test_a_finished_run_goes_through_a_server_until_its_page_is_of_its_command(flows: Flows, reference: Flows) -> None:
    before, numbers = flows.manifests(), (flows.root / METRICS_FILE).read_bytes()
    run = flows.start()
    run.wait_until(lambda: flows.running(SERVER))

    # A fragment is made in the wave of its update; `embed` is not one of the run's own slots.
    waves = {path.rpartition("/")[0].replace("fragment", "update") for path in before}
    kept = f"policy to report             kept  {len(waves) + 1} waves, nothing to do"
    first = run.finish()
    assert kept in first
    assert "starting a Prefect server" in first
    assert flows.nothing_is_left()
    second = flows.run()
    assert kept in second
    assert "starting a Prefect server" not in second
    assert second.splitlines()[-2:] == first.splitlines()[-2:]
    require_untouched(flows, before)
    require_same_run(flows, reference)
    assert (flows.root / METRICS_FILE).read_bytes() == numbers
    steps = [line["step"] for line in metrics(flows) if "train/loss_avg" in line]
    assert steps == list(range(1, 2 * ITERATIONS + 1))


def test_a_command_killed_while_its_server_starts_leaves_no_process(flows: Flows) -> None:
    run = flows.start()
    run.wait_until(lambda: flows.running(SERVER))
    run.kill()
    assert flows.nothing_is_left()


def test_an_answer_does_not_wait_for_an_acknowledgement(own_prefect_home: Path) -> None:
    asked, environment = [sys.executable, "-c", ASK], told_of_none(os.environ, own_prefect_home)
    said = subprocess.run(asked, env=environment, capture_output=True, text=True, check=True).stdout
    # A delayed acknowledgement takes 40 ms.
    assert float(said) < 0.03


@pytest.mark.slow
def test_a_command_killed_while_a_stage_works_leaves_no_process_and_goes_on(flows: Flows, reference: Flows) -> None:
    flows.forget(REWARD)
    before = flows.manifests()
    run = started_inside_a_shard(flows)
    run.kill()

    assert flows.nothing_is_left()
    require_the_same_command_goes_on(flows, before, reference)


@pytest.mark.slow
def test_ctrl_c_while_a_stage_works_leaves_no_process_and_goes_on(flows: Flows, reference: Flows) -> None:
    flows.forget(REWARD)
    before = flows.manifests()
    run = started_inside_a_shard(flows)
    os.killpg(run.process.pid, signal.SIGINT)

    require_end(run)
    assert flows.nothing_is_left()
    require_the_same_command_goes_on(flows, before, reference)


@pytest.mark.slow
def test_a_command_asked_to_end_while_a_stage_works_leaves_no_process_and_goes_on(
    flows: Flows, reference: Flows
) -> None:
    flows.forget(REWARD)
    before = flows.manifests()
    run = started_inside_a_shard(flows)
    run.process.terminate()

    require_end(run)
    assert flows.nothing_is_left()
    require_the_same_command_goes_on(flows, before, reference)
