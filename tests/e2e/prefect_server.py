"""A Prefect server on a free port of this machine, which a test may stop and start again."""

import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from tests.e2e.flow_process import Flows, eventually

STARTUP_S = 120.0
LASTING_LEASES = {"PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem"}
"""With it the server knows after a restart who has slots of a limit, as docs/prefect.md sets it."""


class PrefectServer:
    """Its home is ``folder``; ``settings`` are variables that it alone has."""

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self._settings = dict(settings or {})
        self._log = folder / "server.txt"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = str(probe.getsockname()[1])
        self.environment = {
            "PREFECT_HOME": str(folder),
            "PREFECT_API_URL": f"http://127.0.0.1:{self._port}/api",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_UI_ENABLED": "false",
            "DO_NOT_TRACK": "1",
        }
        self._own = Flows(folder, self.environment | self._settings).environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", self._port],
                stdout=log,
                stderr=log,
                env=self._own,
            )
        assert eventually(self._answers, STARTUP_S), self._log.read_text(encoding="utf-8", errors="replace")[-4000:]

    def stop(self) -> None:
        """End it, if it runs."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """End it as a machine that fails does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.environment['PREFECT_API_URL']}/health", timeout=2) as response:
                return response.status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
