"""The server of the page's own lines, on an empty ``PREFECT_HOME``: it knows after a restart who has which GPUs."""

import os
import pty
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.flow_process import ROOT, eventually

pytestmark = pytest.mark.slow
STARTUP_S = 180.0
SHORTEST_LEASE_S = 60
"""Prefect's server looks for ended ones every 15 s."""


def server_line() -> str:
    """Return the line of the page that starts the server."""
    text = (ROOT / "docs" / "prefect.md").read_text(encoding="utf-8")
    block = re.search(r"## Set up\n.*?```bash\n(.*?)```", text, re.DOTALL)
    assert block is not None
    (line,) = [line for line in block[1].splitlines() if "prefect server start" in line]
    return line


class Server:
    """What a person has who gives the page's lines on a terminal and takes the first choice when Prefect asks."""

    def __init__(self, home: Path, port: int) -> None:
        bare = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        path = f"{Path(sys.executable).parent}:{bare['PATH']}"
        self.environment = bare | {"PATH": path, "PREFECT_HOME": str(home), "DO_NOT_TRACK": "1"}
        self.port = port
        self.api = httpx.Client(base_url=f"http://127.0.0.1:{port}/api", timeout=60.0)
        self._process: subprocess.Popen[bytes] | None = None
        self._terminal = -1

    def start(self) -> None:
        """Returns when it answers."""
        self._terminal, theirs = pty.openpty()
        command = f"exec env {server_line()} --port {self.port}"
        self._process = subprocess.Popen(
            ["sh", "-c", command], cwd=ROOT, env=self.environment, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        os.set_blocking(self._terminal, False)
        assert eventually(self._answers, STARTUP_S)

    def kill(self) -> None:
        """End it as a machine that fails does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            os.close(self._terminal)
            self._process = None

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """Its answer, once it is not overloaded."""
        response = self.api.request(method, path, json=body)
        for _ in range(20):
            if response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                break
            time.sleep(0.5)
            response = self.api.request(method, path, json=body)
        response.raise_for_status()
        return response.json() if response.content else None

    def _answers(self) -> bool:
        try:
            said = os.read(self._terminal, 2**16)
        except OSError:
            said = b""
        if b"How would you like to proceed" in said:
            os.write(self._terminal, b"\r")
        if b"Enter a new profile name" in said:
            os.write(self._terminal, b"local\r")
        try:
            return self.api.get("/health", timeout=2.0).is_success
        except httpx.HTTPError:
            time.sleep(0.2)
            return False


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Not started yet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Server(tmp_path, port)
    yield server
    server.kill()
    server.api.close()


def test_slots_that_are_taken_while_the_server_starts_again_come_back(server: Server):
    server.start()
    server.ask("POST", "/v2/concurrency_limits/", {"name": "gpus", "limit": 3, "active": True})
    taken = {"names": ["gpus"], "slots": 2, "mode": "concurrency", "lease_duration": SHORTEST_LEASE_S}
    lease = server.ask("POST", "/v2/concurrency_limits/increment-with-lease", taken)["lease_id"]
    server.kill()
    server.start()

    def in_use() -> int:
        return server.ask("GET", "/v2/concurrency_limits/gpus")["active_slots"]

    # The flow that has them renews its lease, as before.
    assert in_use() == 2
    server.ask("POST", f"/v2/concurrency_limits/leases/{lease}/renew", {"lease_duration": SHORTEST_LEASE_S})
    check = ["cosmos-flows", "infra", "check", "--json", "--store", server.environment["PREFECT_HOME"]]
    said = subprocess.run(
        check,
        cwd=ROOT,
        env=server.environment | {"PREFECT_API_URL": f"{server.api.base_url}".rstrip("/")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    ).stdout
    assert "taken slots survive a restart of the server" in said
    # Nobody renews it any more.
    assert eventually(lambda: in_use() == 0, 3 * SHORTEST_LEASE_S)
