"""Artifacts of a run on a real Prefect server: created once and then replaced."""

import json
from typing import Any

import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.showing.board import Board, Shown
from tests.e2e.flow_process import AFTER_LAST_UPDATE, ITERATIONS, RUN_ID, Flows, require_same_run
from tests.faulty_proxy import Exchange, faulty_proxy, lost, unavailable

KINDS = {"iterations": "table", "progress": "progress", "pictures": "markdown", "report": "markdown"}


def artifacts(environment: dict[str, str]) -> list[dict[str, Any]]:
    """All artifacts of the server, as the UI asks for them, the newest first."""
    answer = httpx.post(f"{environment['PREFECT_API_URL']}/artifacts/filter", json={"sort": "CREATED_DESC"}, timeout=60)
    return answer.raise_for_status().json()


@flow(name="boarded")
def boarded() -> None:
    """A flow that only has a flow run."""


def test_a_board_creates_once_and_then_replaces_also_after_lost_answers(prefect_environment: dict[str, str]):
    with faulty_proxy(prefect_environment["PREFECT_API_URL"]) as proxy:
        proxy.always = lambda request: (lost if request.path.endswith("/artifacts/") else Exchange.pass_on)(request)
        with temporary_settings({PREFECT_API_URL: f"{proxy.endpoint}/api"}):
            with get_client(sync_client=True) as client:
                run = client.create_flow_run(boarded)
            for value in (1.0, 2.0, 3.0):
                with Board(run.id, print) as board:
                    board.put("boarded-progress", Shown("progress", value, f"at {value}"))
    (found,) = (one for one in artifacts(prefect_environment) if one["key"] == "boarded-progress")
    assert (found["data"], found["description"], found["flow_run_id"]) == (3.0, "at 3.0", str(run.id))


@pytest.mark.slow
@pytest.mark.usefixtures("with_prefect")
def test_a_running_and_a_finished_run_show_their_artifacts(flows: Flows, prefect_environment: dict[str, str]):
    def shown() -> dict[str, dict[str, Any]]:
        mine = (one for one in artifacts(prefect_environment) if one["id"] not in before)
        return {one["key"].removeprefix(f"{RUN_ID}-"): one for one in mine if one["key"].startswith(f"{RUN_ID}-")}

    before = {one["id"] for one in artifacts(prefect_environment)}
    flows.forget(f"iterations/{ITERATIONS - 1:04d}", *AFTER_LAST_UPDATE)
    started = flows.start()
    started.wait_until(lambda: {"progress", "report"} <= shown().keys())
    assert 0.0 <= float(shown()["progress"]["data"]) < 100.0
    started.finish()
    found = shown()
    assert {key: one["type"] for key, one in found.items()} == KINDS
    assert len({one["flow_run_id"] for one in found.values()}) == 1
    rows = json.loads(found["iterations"]["data"])
    assert [row["iteration"] for row in rows] == [str(k) for k in reversed(range(ITERATIONS))]
    assert float(found["progress"]["data"]) == 100.0
    assert "data:image/" in found["pictures"]["data"]
    assert "report/index.html" in found["report"]["data"]
    graph = httpx.get(f"{prefect_environment['PREFECT_API_URL']}/flow_runs/{found['report']['flow_run_id']}/graph-v2")
    top = {node["label"] for _, node in graph.raise_for_status().json()["nodes"] if not node["encapsulating"]}
    assert {f"iteration-{k:04d}" for k in range(ITERATIONS)} <= top
    assert not any("/" in label for label in top)


@pytest.mark.slow
@pytest.mark.usefixtures("with_prefect")
def test_a_server_that_takes_no_artifacts_costs_a_run_nothing(flows: Flows, reference: Flows):
    flows.forget(f"iterations/{ITERATIONS - 1:04d}", *AFTER_LAST_UPDATE)
    with faulty_proxy(flows.given["PREFECT_API_URL"]) as proxy:
        proxy.always = lambda request: (unavailable if "/artifacts" in request.path else Exchange.pass_on)(request)
        flows.use_prefect({"PREFECT_API_URL": f"{proxy.endpoint}/api"})
        said = flows.run()
    assert said.count("Prefect takes no artifacts now") == 1
    require_same_run(flows, reference)
