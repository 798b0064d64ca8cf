"""Clients that keep connections: the service answers others, with few open files and few lines of log."""

import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.serving import connections
from tests import running_service as running
from tests.running_service import Command, free_port, image_frame
from tests.upstream_client import UpstreamClient

pytestmark = pytest.mark.processes
OPEN_FILES, NUM_CLIENTS = 256, 400
KINDS = 3
"""Number of messages that slow clients can cause."""
HALF_A_HEAD = b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: "
HALF_A_BODY = (
    f"POST /api/reward/enqueue HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {running.TOKEN}\r\n"
    "Content-Length: 1000\r\n\r\n{"
).encode()
MANY = f"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {running.TOKEN}\r\n\r\n".encode() * 4000
"""Requests whose answers are more than the system keeps for a client that reads none."""


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    yield from with_few_files(tmp_path, body_timeout_s=5)


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Command]:
    """A service that waits for bodies as long as it does by default."""
    yield from with_few_files(tmp_path)


def with_few_files(tmp_path: Path, **settings: float) -> Iterator[Command]:
    values = running.settings(tmp_path, {"reward_type": "probe"}, **settings) | {"port": free_port()}
    found = Command(running.write(tmp_path, values), before=("prlimit", f"--nofile={OPEN_FILES}:{OPEN_FILES}"))
    try:
        yield found
    finally:
        if found.process is not None and found.process.poll() is None:
            found.kill()


def connect(client: UpstreamClient, sent: bytes, opened: ExitStack) -> socket.socket:
    host, port = client.url.removeprefix("http://").split(":")
    found = opened.enter_context(socket.socket())
    # As small as the system allows it.
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    found.settimeout(20)
    found.connect((host, int(port)))
    found.setblocking(False)
    with suppress(OSError):
        found.send(sent)
    return found


def is_gone_after(connection: socket.socket, sent: bytes, within_s: float) -> float:
    """Send on, until the service closes the connection. Return the seconds that this took."""
    started_s = time.monotonic()
    while (seconds := time.monotonic() - started_s) < within_s:
        try:
            connection.send(sent)
        except BlockingIOError:
            pass
        except ConnectionError:
            return seconds
        time.sleep(0.1)
    raise TimeoutError(f"the connection is open after {within_s} s")


@pytest.mark.parametrize("sent", [HALF_A_HEAD, HALF_A_BODY, b""], ids=["heads", "bodies", "nothing"])
def test_hundreds_of_slow_clients_keep_no_other_out(command: Command, sent: bytes):
    client = command.start()
    running.wait_ready(client)
    with ExitStack() as opened:
        started_s = time.monotonic()
        for _ in range(NUM_CLIENTS):
            connect(client, sent, opened)
        asked_s = time.monotonic()
        assert client.get("/healthz")[0] == 200
        assert time.monotonic() - asked_s < 10
        # Bodies that do not come are given up before requests are taken again.
        deadline_s = time.monotonic() + 60
        while (status := client.post("enqueue", image_frame("a"))[0]) != 200:
            assert status == 503
            assert time.monotonic() < deadline_s
            time.sleep(0.5)
        seconds = time.monotonic() - started_s
    lines = command.path.with_suffix(".log").read_text().splitlines()
    assert len(lines) <= KINDS * (seconds + 2), lines[:10]
    assert command.terminate() == 0


def test_health_is_told_and_requests_are_refused_while_all_connections_wait_for_bodies(patient: Command):
    client = patient.start()
    running.wait_ready(client)
    with ExitStack() as opened:
        for _ in range(NUM_CLIENTS):
            connect(client, HALF_A_BODY, opened)
        asked_s = time.monotonic()
        assert client.get("/healthz")[0] == 200
        assert client.post("enqueue", image_frame("a"))[0] == 503
        assert time.monotonic() - asked_s < 10


def test_connections_are_as_many_as_there_are_files_for():
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, limit[1]))
        assert connections.most(2048, processes=1) == (OPEN_FILES - 64 - 4) // 2
        assert connections.most(20, processes=1) == 20
        resource.setrlimit(resource.RLIMIT_NOFILE, (80, limit[1]))
        with pytest.raises(ConfigError, match=r"may open 80 files; expected at least 100 \(ulimit -n\)"):
            connections.most(2048, processes=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_a_head_that_arrives_byte_by_byte_ends_its_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "HEADERS_S", 1.0)
    with running.in_thread(running.write(tmp_path, running.settings(tmp_path))) as client, ExitStack() as opened:
        assert is_gone_after(connect(client, HALF_A_HEAD, opened), b"x", within_s=30) > 0.5


def test_a_body_that_hardly_arrives_is_given_up(tmp_path: Path):
    settings = running.settings(tmp_path, body_timeout_s=1)
    with running.in_thread(running.write(tmp_path, settings)) as client, ExitStack() as opened:
        slow, answer, deadline_s = connect(client, HALF_A_BODY, opened), b"", time.monotonic() + 30
        while not answer and time.monotonic() < deadline_s:
            slow.send(b" ")
            time.sleep(0.3)
            with suppress(BlockingIOError):
                answer = slow.recv(4096)
        assert answer.startswith(b"HTTP/1.1 408")


def test_a_client_that_reads_no_answer_loses_its_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "READ_S", 1.0)
    monkeypatch.setattr(connections, "HEADERS_S", 1.0)
    with running.in_thread(running.write(tmp_path, running.settings(tmp_path))) as client, ExitStack() as opened:
        # The service stops taking requests whose answers nobody reads, and then ends the connection.
        is_gone_after(connect(client, MANY, opened), MANY, within_s=50)
        assert client.get("/healthz")[0] == 200
