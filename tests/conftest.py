"""Stores to test on: a local directory, and S3 from servers in processes of their own, moto and SeaweedFS."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from tests.seaweed import SeaweedFS

BUCKET = "tests"
STARTUP_TIMEOUT_S = 60


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """URL of an empty bucket; every process started from here on finds the server by its environment."""
    port = _free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        try:
            _wait_for(port, server)
            fsspec.filesystem("s3").mkdir(BUCKET)
            yield f"s3://{BUCKET}"
        finally:
            os.kill(server.pid, signal.SIGKILL)
            server.wait()


@pytest.fixture(scope="session")
def seaweed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """A real S3 server."""
    server = SeaweedFS(tmp_path_factory.mktemp("seaweed"))
    try:
        server.start()
        server.make_bucket()
        yield server
    finally:
        server.kill()


@pytest.fixture
def seaweed(seaweed_server: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> SeaweedFS:
    """The server, which all s3:// URLs are at: cosmos-rl's variables come before AWS's, which lead to moto."""
    for name, value in seaweed_server.variables.items():
        monkeypatch.setenv(name, value)
    return seaweed_server


@pytest.fixture(params=["local", "s3"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place of its own on each kind of store."""
    if request.param == "local":
        return str(tmp_path / "store")
    return f"{request.getfixturevalue('s3_url')}/{secrets.token_hex(8)}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for(port: int, server: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + STARTUP_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if server.poll() is not None:
            raise RuntimeError(f"moto.server ended with {server.returncode}")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError(f"moto.server did not listen on port {port} within {STARTUP_TIMEOUT_S} s")
