"""Reward services for tests: in a thread of this process, or as the command in a process of its own."""

import asyncio
import http.client
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos_rl_core.config import toml
from cosmos_rl_core.reward_service import config, server
from cosmos_rl_core.reward_service.spool import Spool
from tests.upstream_client import UpstreamClient, frame

PROBE = str(Path(__file__).parent / "core" / "reward_service" / "probe.py")
TOKEN = "token-of-the-tests"
READY_S = 60.0


def settings(folder: Path, *scorers: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Values of a file of settings with the probe, or these scorers. ``more`` is for ``[service]``."""
    scorers = scorers or ({"reward_type": "probe"},)
    service = {"spool": str(folder / "spool"), "plugins": [PROBE]} | more
    return {"port": 0, "reward_args": [{"device": "cpu"} | each for each in scorers], "service": service}


def write(folder: Path, values: dict[str, Any]) -> Path:
    path = folder / "rewards.toml"
    path.write_text(toml.dumps(values), encoding="utf-8")
    return path


def environment(token: str = TOKEN) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != config.TOKEN} | (
        {config.TOKEN: token} if token else {}
    )


def images(count: int = 2, size: int = 4, first: int = 0) -> np.ndarray:
    """Images of unlike, known means: ``first``, ``first + 1``, ..."""
    return np.stack([np.full((size, size, 3), first + i, np.uint8) for i in range(count)])


def image_frame(*prompts: str, reward: str = "probe", first: int = 0, size: int = 4, **more: Any) -> bytes:
    return frame(prompts, {reward: 1.0}, images(len(prompts), size, first), media_type="image", **more)


def unfinished_upload(client: UpstreamClient) -> http.client.HTTPConnection:
    """Send half of a body, whose other half never comes."""
    body = image_frame("a", size=64)
    connection = http.client.HTTPConnection(client.url.removeprefix("http://"), timeout=30)
    connection.putrequest("POST", "/api/reward/enqueue")
    connection.putheader("Authorization", f"Bearer {client.token}")
    connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body[: len(body) // 2])
    return connection


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def name_to_clients(service: UpstreamClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name the service in the environment, as a run finds it."""
    monkeypatch.setenv("REMOTE_REWARD_ENQUEUE_URL", f"{service.url}/api/reward/enqueue")
    monkeypatch.setenv("REMOTE_REWARD_FETCH_URL", f"{service.url}/api/reward/pull")
    monkeypatch.setenv("REMOTE_REWARD_TOKEN", TOKEN)


def wait_ready(client: UpstreamClient, timeout_s: float = READY_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        try:
            if client.get("/healthz")[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.02)
    raise TimeoutError(f"not ready within {timeout_s} s: {client.get('/healthz')}")


@contextmanager
def in_thread(path: Path, token: str = TOKEN, *, ready: bool = True) -> Iterator[UpstreamClient]:
    """A running service, in a thread."""
    read = config.read(path, environment(token))
    ended: list[BaseException] = []
    with Spool(Path(read.settings.service.spool)) as spool, server.listening(read) as listening:
        loop, stop = asyncio.new_event_loop(), asyncio.Event()

        def serve() -> None:
            try:
                loop.run_until_complete(server.serve(read, spool, listening, stop))
            except BaseException as error:
                ended.append(error)
                raise
            finally:
                loop.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            client = UpstreamClient(server.url_of(listening), token)
            if ready:
                wait_ready(client)
            yield client
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
    assert not ended


@dataclass
class Command:
    """The command in a process of its own, which can be killed and started again at another port."""

    path: Path
    token: str = TOKEN
    before: tuple[str, ...] = ()
    """Words before the command, such as ``prlimit --nofile=256``."""
    process: "subprocess.Popen[str] | None" = None
    lines: list[str] = field(default_factory=list[str])

    def start(self) -> UpstreamClient:
        """Start it, and return a client of it as soon as it listens."""
        command = [*self.before, sys.executable, "-m", "flows", "reward-service", str(self.path)]
        with self.path.with_suffix(".log").open("a") as log:
            self.process = subprocess.Popen(
                command, env=environment(self.token), stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self.process.stdout is not None
        self.lines = [self.process.stdout.readline()]
        found = re.search(r"http://\S+", self.lines[0])
        assert found is not None, self.path.with_suffix(".log").read_text()
        return UpstreamClient(found[0], self.token)

    def kill(self) -> None:
        """End it without a word."""
        assert self.process is not None
        self.process.kill()
        self.process.communicate()

    def terminate(self) -> int:
        """End it in order; returns its exit code."""
        assert self.process is not None
        self.process.terminate()
        self.lines += self.process.communicate()[0].splitlines()
        return self.process.returncode
