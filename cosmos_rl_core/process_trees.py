"""End whole process trees."""

import os
import time
from collections.abc import Callable, Sequence

import psutil

GRACE_S = 120.0
"""Wait for killed processes to be gone. Those with a GPU first give its memory back, which takes long for 140 GB."""
REAPED_S = 1.0
"""Wait for the parents of exited processes, or the system in their place, to take notice."""
LOOK_S = 0.02


def tree(pid: int) -> list[psutil.Process]:
    """A process and everything it started.

    Torchrun's workers live in sessions of their own, so process groups do not reach them.
    """
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill(processes: Sequence[psutil.Process]) -> None:
    """Kill these and wait until they are gone, so that their memory is free for the next attempt, on GPUs too.

    A GPU's driver frees the memory of a process while that exits, so one that nobody has waited for yet has none.
    """
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    _wait(processes, _has_exited, GRACE_S)
    _wait(processes, _is_reaped, REAPED_S)


def _wait(processes: Sequence[psutil.Process], happened: Callable[[psutil.Process], bool], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not all(happened(process) for process in processes) and time.monotonic() < deadline_s:
        time.sleep(LOOK_S)


def _has_exited(process: psutil.Process) -> bool:
    try:
        if not process.is_running():
            return True
        # The first thread may have exited before others, who still have the process's files and devices open.
        return process.status() == psutil.STATUS_ZOMBIE and len(os.listdir(f"/proc/{process.pid}/task")) <= 1
    except (psutil.NoSuchProcess, FileNotFoundError):
        return True


def _is_reaped(process: psutil.Process) -> bool:
    """Whether nobody but this process itself has to wait for it any more."""
    try:
        return not process.is_running() or process.ppid() == os.getpid()
    except psutil.NoSuchProcess:
        return True


def kill_tree(pid: int) -> None:
    """Kill a process and everything it started."""
    kill(tree(pid))
