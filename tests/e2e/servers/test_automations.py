"""Automations that ``infra init`` makes, on a real server: each does what its name says. No worker, no stage."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prefect import flow
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Paused, Running, Suspended
from prefect.utilities.callables import parameter_schema

from cosmos_rl_core.errors import ConfigError
from flows.auditing.flow import audit
from flows.operations import pools
from flows.operations.automations import Wanted
from flows.running import events
from flows.running.tags import PROJECT
from tests.e2e.flow_process import RUN_ID, Flows, eventually

HAPPENS_S = 120.0
"""The server has one process for all."""
BLOCK = "custom-webhook/ops"


class Receiver(BaseHTTPRequestHandler):
    """Whoever gets the messages."""

    received: list[str]

    def do_POST(self) -> None:
        self.received.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def block() -> Iterator[Callable[[], list[str]]]:
    """Saves a block that sends messages, and returns those that it has sent."""
    messages: list[str] = []
    handler = type("Handler", (Receiver,), {"received": messages})

    def save() -> list[str]:
        text = {"text": "{{subject}}\n{{body}}"}
        url = f"http://127.0.0.1:{server.server_port}"
        CustomWebhookNotificationBlock(name="ops", url=url, json_data=text, headers={}, cookies={}).save("ops")
        return messages

    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield save
        server.shutdown()


@pytest.fixture
def client(prefect_environment: dict[str, str]) -> Iterator[SyncPrefectClient]:
    """Yield a client of a server without automations of other tests."""
    url = prefect_environment["PREFECT_API_URL"]
    with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as client:
        remove_automations(client)
        yield client
        remove_automations(client)
        pools.set_up(None, "process")


def remove_automations(client: SyncPrefectClient) -> None:
    for one in client.read_automations():
        client.delete_automation(one.id)


@flow(name="anybody")
def anybody() -> None:
    """A flow that never begins."""


def test_names_that_the_server_does_not_know_are_listed_with_those_that_it_knows(client: SyncPrefectClient):
    client.create_deployment(client.create_flow(audit), "runs")
    wanted = Wanted("slack-webhook/team", "audit/nobody", ("local", "preprocess/nobody"))
    with pytest.raises(ConfigError) as refused:
        pools.set_up(None, "process", wanted)
    said = str(refused.value)
    assert "no block that sends messages 'slack-webhook/team'; known: " in said
    assert "no deployment of the flow 'audit' 'audit/nobody'; known: audit/runs; make it with `prefect " in said
    assert all(f"no deployment of the flow 'preprocess' {name!r}" in said for name in wanted.prepare)
    assert client.read_automations() == []


def test_a_message_is_sent_once_when_a_flow_run_waits_for_people(
    client: SyncPrefectClient, block: Callable[[], list[str]]
):
    messages = block()
    pools.set_up(None, "process", Wanted(message=BLOCK))
    made = pools.set_up(None, "process", Wanted(message=BLOCK)).automations
    assert sorted(made) == sorted(one.name for one in client.read_automations())
    foreign, suspended, paused = (
        client.create_flow_run(anybody, tags=[tag], state=Running()) for tag in ("theirs", PROJECT, PROJECT)
    )
    client.set_flow_run_state(foreign.id, Suspended(), force=True)
    client.set_flow_run_state(suspended.id, Suspended(message="iteration 1 exceeds its limits"), force=True)
    assert eventually(lambda: messages, HAPPENS_S)
    client.set_flow_run_state(paused.id, Paused(), force=True)
    assert eventually(lambda: len(messages) > 1, HAPPENS_S)
    first, second = messages
    assert f"{suspended.name} is Suspended\\niteration 1 exceeds its limits\\n" in first
    assert f"flow-run/{suspended.id}" in first
    assert f"{paused.name} is Paused\\n\\n" in second


def test_a_run_that_is_finished_is_audited(client: SyncPrefectClient, reference: Flows):
    schema = parameter_schema(audit).model_dump_for_openapi()
    deployment = client.create_deployment(
        client.create_flow(audit), "runs", parameter_openapi_schema=schema, enforce_parameter_schema=True
    )
    pools.set_up(None, "process", Wanted(audit="audit/runs"))
    made_by = DeploymentFilter(id=DeploymentFilterId(any_=[deployment]))

    @flow(name="finishes")
    def finishes() -> None:
        events.run_finished(reference.planned, "ocr 0.615 -> 0.820", {"ocr": (0.615, 0.820)})

    finishes()
    EventsWorker.instance().wait_until_empty()
    assert eventually(lambda: client.read_flow_runs(deployment_filter=made_by), HAPPENS_S)
    (found,) = client.read_flow_runs(deployment_filter=made_by)
    assert found.parameters == {"run_id": RUN_ID, "store": reference.store}
    # No worker of another test shall take it.
    client.delete_flow_run(found.id)
