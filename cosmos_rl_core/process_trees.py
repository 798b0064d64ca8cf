"""End whole process trees, and ask processes that hang for their stacks."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import psutil

from cosmos_rl_core.processes import STACKS

GRACE_S = 120.0
"""Seconds to wait until killed processes are gone. Freeing the 140 GB of a GPU takes long."""
REAPED_S = 1.0
"""Seconds to wait until the parents of exited processes, or the system in their place, collect the exit codes."""
LOOK_S = 0.02
TREE_INTERVAL_S = 1.0
"""Interval in seconds at which the descendants of a process are listed."""
STACKS_S, NEXT_STACK_S = 0.5, 0.3
"""Seconds for processes to write their stacks: for the last process, and for each one before the next one begins."""
KILLED = -9
"""Return code assumed for a process whose own is unknown: ended by SIGKILL."""


class Process(Protocol):
    """A started process."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit code (negative: the signal), or None while it runs."""
        ...


class Watched:
    """A process and its descendants, which may outlive it."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._returncode: int | None = None
        self._tree: list[psutil.Process] = []
        self._looked_s = 0.0

    @property
    def pid(self) -> int:
        """Return the id of the process."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self._returncode is None:
            now_s = time.monotonic()
            found = tree(self._process.pid) if now_s - self._looked_s > TREE_INTERVAL_S else []
            self._returncode = self._process.poll()
            # The children of an ended process have other parents.
            if found and self._returncode is None:
                self._looked_s, self._tree = now_s, found
        return self._returncode

    def show_stacks(self) -> None:
        """Let the process and its descendants write their stacks to their logs, if it runs; see :func:`show_stacks`."""
        if self.poll() is None:
            show_stacks(tree(self._process.pid))

    def end(self, grace_s: float = 0.0) -> None:
        """Kill the process and its descendants. With ``grace_s``, send SIGTERM first and wait for so many seconds."""
        if self.poll() is None:
            found = tree(self._process.pid)
            self._tree += found
            if grace_s and found:
                found[0].terminate()
                _wait_until(lambda: self._process.poll() is not None, grace_s)
        kill(self._tree)
        if self._returncode is None:
            code = self._process.poll()
            self._returncode = KILLED if code is None else code


def tree(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants; an empty list if the process has ended.

    Torchrun's workers live in sessions of their own, so process groups do not reach them.
    """
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill(processes: Sequence[psutil.Process]) -> None:
    """Kill processes and wait until they are gone, so that their memory is free for the next attempt, on GPUs too.

    A GPU's driver frees the memory of a process as the process exits, so a zombie holds none.
    """
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _wait_until(lambda: all(map(_has_exited, processes)), GRACE_S)
    _wait_until(lambda: all(map(_is_reaped, processes)), REAPED_S)


def show_stacks(processes: Sequence[psutil.Process]) -> None:
    """Ask the processes that handle the signal for the stacks of their threads, and wait a moment for the text."""
    asked = [process for process in processes if _catches(process.pid, STACKS)]
    for process in asked:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(STACKS)
        # One after the other: they write to one log, word by word.
        time.sleep(NEXT_STACK_S)
    if asked:
        time.sleep(STACKS_S)


def _catches(pid: int, number: int) -> bool:
    """Return whether a process handles a signal. Without a handler the signal would end it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)


def _wait_until(happened: Callable[[], bool], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not happened() and time.monotonic() < deadline_s:
        time.sleep(LOOK_S)


def _has_exited(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess, FileNotFoundError):
        if process.is_running():
            # The first thread may have exited before others, which still have the process's files and devices open.
            is_zombie = process.status() == psutil.STATUS_ZOMBIE
            return is_zombie and len(os.listdir(f"/proc/{process.pid}/task")) <= 1
    return True


def _is_reaped(process: psutil.Process) -> bool:
    """Return whether the process is gone, or is a child that only this process can wait for."""
    with suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.ppid() == os.getpid()
    return True


def kill_tree(pid: int) -> None:
    """Kill a process and everything it started."""
    kill(tree(pid))
