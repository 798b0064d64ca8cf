"""Events of runs on a real Prefect server: what a command did is told once, what was already current never."""

from typing import Any

import httpx
import pytest
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.auditing.flow import audit
from flows.running import events
from flows.running.tags import PROJECT
from tests.e2e.flow_process import AFTER_LAST_UPDATE, ITERATIONS, RUN_ID, Flows, eventually, require_same_run
from tests.faulty_proxy import faulty_proxy

ARRIVES_S = 60.0
OVER_BUDGET = 76
LAST = f"iterations/{ITERATIONS - 1:04d}"
MATERIALIZED = "prefect.asset.materialization.succeeded"


def told(flows: Flows, environment: dict[str, str], *names: str) -> list[dict[str, Any]]:
    """Events about the run of a store, in order, as far as they have arrived; of these names, if any are given."""
    names = names or (events.PREFIX,)
    asked = {"filter": {"event": {"prefix": [*names]}, "order": "ASC"}, "limit": 50}
    answer = httpx.post(f"{environment['PREFECT_API_URL']}/events/filter", json=asked, timeout=60.0)
    return [one for one in answer.raise_for_status().json()["events"] if flows.store in str(one)]


def names_of(found: list[dict[str, Any]]) -> list[str]:
    return [one["event"] for one in found]


@pytest.mark.slow
@pytest.mark.usefixtures("with_prefect")
def test_a_run_tells_once_of_what_it_made_and_of_its_end(flows: Flows, prefect_environment: dict[str, str]):
    flows.forget(LAST, *AFTER_LAST_UPDATE)
    flows.run()
    assert eventually(lambda: told(flows, prefect_environment, events.RUN_FINISHED), ARRIVES_S)
    committed, finished = told(flows, prefect_environment)
    assert names_of([committed, finished]) == [events.POLICY_COMMITTED, events.RUN_FINISHED]
    assert committed["resource"] == {
        "prefect.resource.id": f"cosmos-flows.run.{RUN_ID}",
        "prefect.resource.name": RUN_ID,
        "cosmos-flows.store": flows.store,
    }
    related = {one["prefect.resource.role"]: one["prefect.resource.id"] for one in committed["related"]}
    assert {"flow-run", "flow"} <= related.keys()
    assert f"prefect.tag.{PROJECT}" in [one["prefect.resource.id"] for one in committed["related"]]
    place = {"run": RUN_ID, "store": flows.store, "url": str(flows.root)}
    policy = flows.planned.slots.policy(ITERATIONS)
    assert committed["payload"].items() >= (place | {"version": ITERATIONS, "policy": policy}).items()
    assert finished["payload"] == place | {
        "iterations": ITERATIONS,
        "policy": policy,
        "report": f"{flows.root}/report/index.html",
        "result": f"{ITERATIONS} iterations, nothing held out",
        "held_out": {},
    }
    (asset,) = told(flows, prefect_environment, MATERIALIZED)
    assert asset["resource"]["prefect.resource.id"] == f"file://{flows.root}/policy"
    assert asset["payload"]["content"] == committed["payload"]["content"]
    # All of it is made now, and there is no room for more.
    flows.run()
    flows.run("--iterations", str(ITERATIONS + 1), "--set", "train.max_gpu_hours=1e-9", expect=OVER_BUDGET)
    assert eventually(lambda: told(flows, prefect_environment, events.BUDGET_REACHED), ARRIVES_S)
    assert names_of(told(flows, prefect_environment)[2:]) == [events.BUDGET_REACHED]
    (reached,) = told(flows, prefect_environment, events.BUDGET_REACHED)
    assert f"iteration {ITERATIONS} would exceed" in reached["payload"]["reason"]


def test_an_audit_tells_of_each_run_with_faults(flows: Flows, prefect_environment: dict[str, str]):
    file = next((flows.root / LAST / "update").rglob("*.safetensors"))
    file.write_bytes(b"x" + file.read_bytes()[1:])
    with temporary_settings({PREFECT_API_URL: prefect_environment["PREFECT_API_URL"]}):
        state = audit(store=flows.store, return_state=True)
        EventsWorker.instance().wait_until_empty()
    assert state.is_failed()
    assert eventually(lambda: told(flows, prefect_environment), ARRIVES_S)
    (failed,) = told(flows, prefect_environment)
    assert (failed["event"], failed["payload"]["run"]) == (events.AUDIT_FAILED, RUN_ID)
    assert failed["payload"]["faults"] == len(failed["payload"]["first"]) > 0
    assert file.name in failed["payload"]["first"][0]


@pytest.mark.slow
@pytest.mark.usefixtures("with_prefect")
def test_a_server_that_takes_no_events_ends_no_run(flows: Flows, reference: Flows, prefect_environment: dict[str, str]):
    flows.forget(LAST, *AFTER_LAST_UPDATE)
    with faulty_proxy(prefect_environment["PREFECT_API_URL"]) as proxy:
        proxy.tunnels = False
        flows.use_prefect({"PREFECT_API_URL": f"{proxy.endpoint}/api"})
        flows.run()
    assert told(flows, prefect_environment) == []
    require_same_run(flows, reference)
