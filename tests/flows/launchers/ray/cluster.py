"""A real Ray cluster of several nodes on this machine, in a network of its own, since Ray listens on every address."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ParamSpec, TypeVar

import psutil
import pytest

from tests.flows.network import Network

P = ParamSpec("P")
R = TypeVar("R")
START_S = 120.0
TRIES = 3
MISSING = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
CANNOT = (
    f"not installed: {', '.join(MISSING)}"
    if MISSING
    else "Ray is not installed"
    if importlib.util.find_spec("ray") is None
    else "this user may make no network: unshare -n"
    if subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode
    else None
)
needs_ray = pytest.mark.skipif(CANNOT is not None, reason=CANNOT or "")
HEAD = "127.0.0.1:6379"
COMMON = ("--block", "--disable-usage-stats", "--object-store-memory=80000000")


class Cluster:
    """A head without resources, and nodes with two pretended GPUs each, whose addresses differ."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self._environment = folder, environment
        self._ray_folders: list[TemporaryDirectory[str]] = []
        self._network = Network()
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.head = self._head()

    def entered(self) -> AbstractContextManager[None]:
        """Be in the cluster's network, with this thread and what it starts."""
        return self._network.entered()

    def inside(self, work: Callable[P, R]) -> Callable[P, R]:
        """Return work as a thread of its own does it in this network."""

        def entered(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.entered():
                return work(*args, **kwargs)

        return entered

    def lose_node(self, number: int) -> None:
        """Kill the daemon of a node, as its loss does. What it started ends by itself."""
        command = self.nodes.pop(number)
        for daemon in psutil.Process(command.pid).children():
            if "raylet" in daemon.name():
                daemon.kill()
        command.wait(60)

    def lose_head(self) -> None:
        """Kill the head and all that runs on its machine."""
        everything = psutil.Process(self.head.pid).children(recursive=True)
        for one in everything:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        self.head.wait(60)

    def start_again(self) -> None:
        """Start a new head and as many nodes as before, at the addresses of those that were lost."""
        numbers = [*self.nodes]
        for number in numbers:
            end(self.nodes.pop(number))
        self.head = self._head()
        for number in numbers:
            self.start_node(number)

    def _ray(self, name: str, *words: str, before: Sequence[str] = (), **environment: str) -> "subprocess.Popen[bytes]":
        """Start a daemon. On a busy machine Ray may give it up after 30 s; then once more."""
        command = [
            *self._network.inside,
            *before,
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            *COMMON,
            *words,
        ]
        given = os.environ | self._environment | environment
        for _ in range(TRIES):
            with (self.folder / f"{name}.log").open("wb") as log:
                began = subprocess.Popen(command, stdout=log, stderr=log, env=given, start_new_session=True)
            _until(lambda began=began: self._has_begun(name) or began.poll() is not None)
            if began.poll() is None:
                return began
            with suppress(ProcessLookupError):
                os.killpg(began.pid, signal.SIGKILL)
        raise AssertionError((self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace"))

    def _head(self) -> "subprocess.Popen[bytes]":
        """Start the head, and wait until it answers."""
        # Ray's sockets lie deep in it, and their paths must be short.
        self._ray_folders.append(TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True))
        host, _, port = HEAD.partition(":")
        words = ("--head", f"--node-ip-address={host}", f"--port={port}", "--num-cpus=0", "--num-gpus=0")
        return self._ray("head", *words, "--include-dashboard=false", f"--temp-dir={self._ray_folders[-1].name}")

    def start_node(self, number: int, *words: str, before: Sequence[str] = (), **environment: str) -> None:
        """Start a node, with more words for ``ray start``, or by a command that comes before it."""
        gpus = ",".join(self.gpus(number))
        there = (f"--address={HEAD}", f"--node-ip-address=127.0.0.{10 + number}", "--num-cpus=4", "--num-gpus=2")
        shown = environment | {"CUDA_VISIBLE_DEVICES": gpus}
        self.nodes[number] = self._ray(f"node{number}", *there, *words, before=before, **shown)

    def gpus(self, number: int) -> list[str]:
        """Return the names of a node's GPUs. No other program of this machine locks devices of these names."""
        return [f"{os.getpid()}{2 * number + place}" for place in range(2)]

    def _has_begun(self, name: str) -> bool:
        return "Ray runtime started" in (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """End all of it."""
        for one in (*self.nodes.values(), self.head):
            end(one)
        self._network.close()
        for folder in self._ray_folders:
            folder.cleanup()


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process with its group."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def running(folder: Path, nodes: Sequence[int], **environment: str) -> Iterator[Cluster]:
    """Have a cluster with some nodes."""
    cluster = Cluster(folder, environment)
    try:
        for number in nodes:
            cluster.start_node(number)
        yield cluster
    finally:
        cluster.close()


def _until(happened: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + START_S
    while not happened():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
