"""Flow runs that Prefect's engine executes, on a real server: what a killed try leaves, and what a mistake logs."""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.flow_engine import flow_run_logger, run_flow
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import AwaitingRetry, Pending

from cosmos_rl_core.errors import ConfigError
from flows.running.launch import grouped
from flows.session.session import ends_in_state
from tests.e2e.flow_process import ROOT, eventually

HEARD_S = 30.0
"""The server hears of tasks late."""


@flow(name="killed once")
@ends_in_state
def killed_once(marker: str) -> str:
    """The first try is killed inside of a group of a group. The second has a task that the server knows as pending."""

    def work() -> None:
        if not Path(marker).exists():
            # Prefect sends the states of tasks in the background.
            time.sleep(3.0)
            Path(marker).touch()
            os._exit(9)
        with get_client(sync_client=True) as api:
            late = task(name="late")(work)
            api.create_task_run(late, UUID(flow_run.get_id()), "0", name="heard late", state=Pending())

    grouped("iterations-0000-0049", partial(grouped, "iteration-0000", work))
    return "done"


@flow(name="mistaken")
@ends_in_state
def mistaken() -> str:
    """A flow with a mistake that has a cause."""
    try:
        raise OSError("no such file")
    except OSError as error:
        raise ConfigError("there is no model '/x';\nname another") from error


def execute(name: str, flow_run: str) -> None:
    """Execute a flow run in this process, as the engine of Prefect's workers does."""
    with get_client(sync_client=True) as client:
        found = client.read_flow_run(UUID(flow_run))
    logger: Any = flow_run_logger(found)
    run_flow({"killed_once": killed_once, "mistaken": mistaken}[name], found, error_logger=logger)


class Tries:
    """A flow run on a server, and processes that execute it."""

    def __init__(self, environment: dict[str, str], name: str, **parameters: str) -> None:
        self._environment, self._name = environment, name
        flows = {"killed_once": killed_once, "mistaken": mistaken}
        with temporary_settings({PREFECT_API_URL: environment["PREFECT_API_URL"]}), get_client(sync_client=True) as api:
            self.flow_run = api.create_flow_run(flows[name], parameters=parameters).id

    def again(self) -> None:
        """Wait until the server may execute it once more, as a retry does."""
        url = self._environment["PREFECT_API_URL"]
        with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as api:
            api.set_flow_run_state(self.flow_run, AwaitingRetry(), force=True)

    def execute(self) -> int:
        """One try, in a process of its own; returns its exit code."""
        code = (
            f"from tests.e2e.servers.test_tried_again import execute; execute({self._name!r}, {str(self.flow_run)!r})"
        )
        environment = os.environ | self._environment | {"PYTHONPATH": str(ROOT)}
        return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=False).returncode

    def ask(self, what: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Ask the server."""
        return httpx.post(f"{self._environment['PREFECT_API_URL']}/{what}/filter", json=body, timeout=60).json()

    def tasks(self) -> list[tuple[str, str]]:
        """Names and states of all tasks of all tries."""
        found = self.ask("task_runs", {"flow_runs": {"id": {"any_": [str(self.flow_run)]}}})
        return sorted((one["name"], one["state_name"]) for one in found)


def test_what_a_killed_try_left_at_work_has_ended_in_a_completed_flow_run(
    prefect_environment: dict[str, str], tmp_path: Path
):
    tries = Tries(prefect_environment, "killed_once", marker=str(tmp_path / "marker"))
    assert tries.execute() == 9
    names = ("iteration-0000", "iterations-0000-0049")
    assert eventually(lambda: tries.tasks() == [(name, "Running") for name in names], HEARD_S), tries.tasks()
    tries.again()
    assert tries.execute() == 0
    ends = [("heard late", "Pending")] + [(name, state) for name in names for state in ("Completed", "Crashed")]
    assert eventually(lambda: tries.tasks() == ends, HEARD_S), tries.tasks()


def test_a_mistake_is_logged_by_its_message_and_last(prefect_environment: dict[str, str]):
    tries = Tries(prefect_environment, "mistaken")
    assert tries.execute() == 1
    query = {"logs": {"flow_run_id": {"any_": [str(tries.flow_run)]}}, "sort": "TIMESTAMP_ASC"}

    def errors() -> list[str]:
        return [line["message"] for line in tries.ask("logs", query) if line["level"] >= 40]

    assert eventually(lambda: bool(errors()), HEARD_S)
    assert "Traceback" not in "".join(line["message"] for line in tries.ask("logs", query))
    assert errors()[-1] == "there is no model '/x';\nname another"
