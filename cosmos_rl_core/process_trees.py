"""End whole process trees."""

from collections.abc import Sequence

import psutil

GRACE_S = 10.0
"""Wait for killed processes to be gone."""


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
    """Kill these and wait until they are gone, so that their memory is free for the next attempt."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=GRACE_S)


def kill_tree(pid: int) -> None:
    """Kill a process and everything it started."""
    kill(tree(pid))
