"""A command's own Prefect server, where the environment names a proxy."""

import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from flows.running import server

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\ntrue"


class Answering:
    """A thread in place of the server's process, which answers every request at the socket that it is given."""

    def __init__(self, *_: object, pass_fds: Sequence[int], **__: object) -> None:
        self._socket = socket.socket(fileno=os.dup(pass_fds[0]))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            asking, _ = self._socket.accept()
            with asking:
                asking.recv(4096)
                asking.sendall(ANSWER)

    def terminate(self) -> None: ...

    def wait(self) -> None: ...


@pytest.fixture(autouse=True)
def no_server_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*server.QUIET, "PREFECT_LOGGING_TO_API_ENABLED"):
        monkeypatch.setenv(name, "false")
    for name in ("PREFECT_API_URL", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", Answering)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("name", "value"), [("no_proxy", "example.org"), ("NO_PROXY", "example.org"), ("no_proxy", "*")]
)
def test_a_command_reaches_its_own_server_past_a_proxy(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with server.prefect_server():
        assert httpx.get(f"{os.environ['PREFECT_API_URL']}/health").json() is True
        assert os.environ["no_proxy"].startswith(value), "others are reached as before"
    assert os.environ[name] == value
    assert ("no_proxy" in os.environ) == (name == "no_proxy")


def test_without_exceptions_there_is_one_as_long_as_the_server_runs() -> None:
    with server.prefect_server():
        assert os.environ["no_proxy"] == "127.0.0.1"
    assert "no_proxy" not in os.environ
