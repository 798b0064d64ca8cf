"""Start stage processes on this machine, cold or warm."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import StageError
from cosmos_rl_core.process_trees import Process, kill_tree
from cosmos_rl_core.processes import PARENT
from flows.devices.devices import VISIBLE, Share
from flows.devices.work_folders import hold
from flows.launchers._base import Job
from stages.registry import STAGES

REPLY_TIMEOUT_S = 120.0
"""Longest wait for a reply of the fork server, in seconds. The first comes after imports, from a slow disk perhaps."""
PROCESSES, TORCHRUN = "cosmos_rl_core.processes", "torch.distributed.run"
OPTIONS = ("--rdzv-backend", "c10d", "--max-restarts", "0")
"""Options of torchrun without restarts: a retry is a new attempt."""

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
"""Variables of a single rank. No stage gets the flow's own, which the job that started it may have set."""


def module(python: str, name: str) -> list[str]:
    """Return the command that runs a module. A folder ``stages`` in the working directory does not hide the package."""
    return [python, "-P", "-m", name]


def python_of(launch: LaunchConfig) -> str:
    """Return the path of the interpreter of new processes."""
    return launch.python or sys.executable


def start(
    command: Sequence[str], python: str, log: Path, environment: Mapping[str, str], share: Share | None = None
) -> Process:
    """Start a command that ends with this process. Its processes keep the locks of a share."""
    with log.open("ab") as file:
        hold(file)
        return subprocess.Popen(
            [*module(python, PROCESSES), *command],
            stdin=subprocess.DEVNULL if share is None else share.file,
            stdout=file,
            stderr=file,
            env=environment,
        )


def start_cold(job: Job, request: Path, log: Path, launch: LaunchConfig, share: Share | None) -> Process:
    """Start a new interpreter, several ranks under torchrun. Its processes keep the locks of a share."""
    python = python_of(launch)
    command = stage_command(job.request.stage, str(request), python, launch)
    return start(command, python, log, environment_here(launch) | _shown(job, share), share)


def start_ahead(folder: Path, log: Path, launch: LaunchConfig, job: Job, share: Share | None) -> Process:
    """Start the processes that score a rollout while it runs, by the Requests in a folder.

    Processes of a stage with torch keep the locks of a share; others get no device.
    """
    chosen = launch.python if launch.mode == "cold" else None
    python, stage = chosen or sys.executable, job.request.stage
    ahead = [*module(python, "stages.scoring.overlap"), str(folder)]
    if STAGES[stage].torch:
        command, shown = ranks_command(stage, ahead, python, launch), _shown(job, share)
    else:
        command, shown = [*ahead, "--processes", str(launch.side_by_side(stage))], {VISIBLE: ""}
    return start(command, python, log, environment_here(launch) | shown, share)


def stage_command(
    stage: str, request: str, python: str, launch: LaunchConfig, host: str = "", order: str = ""
) -> list[str]:
    """Return the command of a stage on each of its nodes. Several nodes meet on ``host`` under the id ``order``."""
    runner = [*module(python, "stages.execution.runner"), request]
    return ranks_command(stage, runner, python, launch, host, order) if STAGES[stage].distributed else runner


def ranks_command(
    stage: str, command: list[str], python: str, launch: LaunchConfig, host: str = "", order: str = ""
) -> list[str]:
    """Return the command by which torchrun starts a command as each rank of a stage; see :func:`stage_command`.

    A single rank starts without torchrun, which is one more interpreter that imports torch.
    """
    nodes = launch.nodes_of(stage)
    if launch.processes_of(stage) == 1:
        return ["env", *(f"{name}={value}" for name, value in ALONE.items()), *command]
    if nodes == 1:
        # Not --standalone, which resolves the host's name and listens on every interface.
        meeting = ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    else:
        # From 20000 to 29999: two stages on one node rarely get the same port.
        port = 20000 + int(digest(order)[:8], 16) % 10000
        meeting = ["--nnodes", str(nodes), "--rdzv-endpoint", f"{host}:{port}", "--rdzv-id", order]
    meeting += ["--nproc-per-node", str(launch.processes_of(stage) // nodes)]
    return [*module(python, TORCHRUN), *OPTIONS, *meeting, "--no-python", *command]


def stage_environment(launch: LaunchConfig) -> dict[str, str]:
    """Return the environment variables that every stage process gets."""
    return {
        "OMP_NUM_THREADS": str(launch.threads),
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8",
    } | launch.environment


def environment_here(launch: LaunchConfig, *, alone: bool = True) -> dict[str, str]:
    """Return the environment of a stage process. ``alone``: all ranks are on this machine, and meet nobody else."""
    ours = stage_environment(launch) | {PARENT: str(os.getpid())}
    inherited = {name: value for name, value in os.environ.items() if name not in ALONE}
    return ({"GLOO_SOCKET_IFNAME": "lo"} if alone else {}) | inherited | ours


def _shown(job: Job, share: Share | None) -> dict[str, str]:
    """Return the variable with the devices that a stage sees: of its share, else of the settings."""
    if share is not None:
        return share.environment
    return {VISIBLE: ",".join(map(str, job.execution.gpus))} if job.execution.gpus else {}


class WarmServer:
    """A fork server. If it ends, its forks are killed, and the next stage needs a new server."""

    def __init__(self, launch: LaunchConfig) -> None:
        self._ended: dict[int, int] = {}
        server = module(sys.executable, "stages.execution.warm.fork_server")
        self._server = subprocess.Popen(
            # It also binds itself to this process, but only after its imports, which take seconds.
            [*module(sys.executable, PROCESSES), *server],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Unbuffered, so that select sees everything that was written.
            bufsize=0,
            # Forks compute on the CPU and lock no device.
            env=environment_here(launch) | {VISIBLE: ""},
            # Ctrl-C reaches the whole process group, but the launcher ends this process.
            start_new_session=True,
        )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._orders, self.replies = self._server.stdin, self._server.stdout
        try:
            self._read()
        except BrokenPipeError as error:
            why = "the fork server did not start; its output is above"
            raise StageError.of("crash", why) from error

    @property
    def is_running(self) -> bool:
        """Return whether the server runs and can fork."""
        return self._server.poll() is None

    def start(self, stage: str, request: Path, log: Path, ranks: int = 1) -> "WarmProcess":
        """Fork the ranks for a stage's request. Raises :class:`StageError` if the server has ended."""
        order = {"stage": stage, "request": str(request), "log": str(log), "ranks": ranks}
        try:
            self._orders.write(json.dumps(order).encode() + b"\n")
            while "returncode" in (reply := self._read()):
                self._ended[reply["pid"]] = reply["returncode"]
        except BrokenPipeError as error:
            if self._server.wait() > 0:
                why = "the fork server could not import what stages need; its output is above"
                raise StageError.of("crash", why) from error
            why = "the fork server ended; the next attempt starts a new one"
            raise StageError.of("killed", why) from error
        # The system reuses process ids.
        self._ended.pop(reply["pid"], None)
        return WarmProcess(reply["pid"], self)

    def returncode(self, pid: int) -> int | None:
        """Return the exit code of a fork, None while it runs. Forks of an ended server were killed."""
        try:
            while pid not in self._ended and self._answers(0):
                reply = self._read()
                self._ended[reply["pid"]] = reply["returncode"]
        except BrokenPipeError:
            return -signal.SIGKILL
        return self._ended.get(pid)

    def _answers(self, timeout_s: float) -> bool:
        return bool(select.select([self.replies], [], [], timeout_s)[0])

    def _read(self) -> dict[str, Any]:
        """Return the next reply. Kill a server that does not answer: it only imports and forks."""
        if not self._answers(REPLY_TIMEOUT_S):
            kill_tree(self._server.pid)
        line = self.replies.readline()
        if not line:
            raise BrokenPipeError("the fork server ended")
        return json.loads(line)

    def close(self) -> None:
        """End the server and its forks."""
        if self.is_running:
            kill_tree(self._server.pid)
        # Wait, and close the pipes. Unread requests do not matter.
        with suppress(BrokenPipeError), self._server:
            pass


@dataclass
class WarmProcess:
    """A runner that the fork server forked, or the parent of several."""

    pid: int
    server: WarmServer

    def poll(self) -> int | None:
        """Return the exit code, or None while the runner runs."""
        return self.server.returncode(self.pid)
