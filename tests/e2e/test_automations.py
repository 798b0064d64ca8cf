"""Automations that ``infra init`` makes, on a real server with a real worker: each does what its name says."""

import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.settings import PREFECT_API_URL, temporary_settings

from tests.e2e.deployed import TIMEOUT_S, Deployed
from tests.e2e.flow_process import AFTER_LAST_UPDATE, RUN_ID, Flows, eventually

pytestmark = pytest.mark.slow
WRONG = 64
BLOCK = "custom-webhook/ops"
USES = ("--message", BLOCK, "--audit", "audit/runs")
SUSPENDS = ["early_warning.limits=[{ reward = 'ocr', above = 0.65 }]", "early_warning.on_trip=suspend"]
"""Means of the three iterations are 0.5625, 0.6875 and 0.625."""


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
def received() -> Iterator[tuple[str, list[str]]]:
    """An address, and the messages that were sent to it."""
    messages: list[str] = []
    handler = type("Handler", (Receiver,), {"received": messages})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", messages
        server.shutdown()


@pytest.fixture
def deployed(prefect_environment: dict[str, str], tmp_path: Path) -> Iterator[Deployed]:
    """A worker with all deployments; the automations go with it."""
    deployed = Deployed(tmp_path / "deployed", prefect_environment)
    deployed.set_up(gpus=2)
    before = {one["id"] for one in deployed.ask("POST", "/automations/filter")}
    yield deployed
    for one in deployed.ask("POST", "/automations/filter"):
        if one["id"] not in before:
            deployed.ask("DELETE", f"/automations/{one['id']}")
    deployed.close()


def init(deployed: Deployed, *options: str, expect: int = 0) -> str:
    return deployed.start_command("flows", "infra", "init", *options).finish(expect)


def test_a_message_is_sent_when_a_run_waits_and_an_audit_follows_its_end(
    deployed: Deployed, reference: Flows, received: tuple[str, list[str]]
):
    address, messages = received
    said = init(deployed, "--message", BLOCK, "--audit", "audit/nobody", "--prepare", "local", expect=WRONG)
    assert f"there is no block that sends messages {BLOCK!r}; known: none" in said
    assert "there is no deployment of the flow 'audit' 'audit/nobody'; known: audit/runs" in said
    assert "known: preprocess/local, preprocess/tiny, preprocess/web" in said
    with temporary_settings({PREFECT_API_URL: deployed.environment["PREFECT_API_URL"]}):
        text = {"text": "{{subject}}\n{{body}}"}
        CustomWebhookNotificationBlock(name="ops", url=address, json_data=text, headers={}, cookies={}).save("ops")
    for _ in range(2):
        assert f"automation 'cosmos: a message by {BLOCK} when a flow run waits for people'" in init(deployed, *USES)
    names = [one["name"] for one in deployed.ask("POST", "/automations/filter")]
    assert len(names) == len({*names})
    shutil.copytree(reference.store, deployed.store)
    deployed.forget("iterations/0001/update", "iterations/0002", *AFTER_LAST_UPDATE)
    flow_run = deployed.schedule("nft/tiny-nft", deployed.parameters(overrides=SUSPENDS))
    deployed.wait(flow_run, "PAUSED")
    assert eventually(lambda: messages, TIMEOUT_S)
    (message,) = messages
    assert "is Suspended" in message
    assert "iteration 1 exceeds its limits" in message
    assert f"flow-run/{flow_run}" in message
    assert deployed.resume(flow_run, who="anna", why="signs can be read") == "ACCEPT"
    deployed.wait(flow_run, "COMPLETED")
    audits = {"deployments": {"id": {"any_": [deployed.deployment("audit/runs")["id"]]}}}
    assert eventually(lambda: deployed.ask("POST", "/flow_runs/filter", audits), TIMEOUT_S)
    (audit,) = deployed.ask("POST", "/flow_runs/filter", audits)
    assert audit["parameters"].items() >= {"run_id": RUN_ID, "store": deployed.store}.items()
    assert "nothing is wrong with 1 run" in deployed.wait(audit["id"], "COMPLETED")["message"]
    assert len(messages) == 1
