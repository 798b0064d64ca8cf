"""Ranks of a stage as forks of this process, which then only waits for them, as torchrun does."""

import os
import signal
from pathlib import Path

from cosmos_rl_core.processes import become_rank, die_with_parent


def lead(count: int, meeting: Path) -> int | None:
    """Fork ``count`` ranks. Return None in each; in the parent, the exit code of the first that failed, else 0.

    When a rank fails, the others are killed. A rank that a signal ended has 128 plus the signal's number as its code.
    The ranks join their process group at the file ``meeting``, which does not exist yet.
    """
    die_with_parent()
    running: set[int] = set()
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            become_rank(rank, count, meeting)
            return None
        running.add(pid)
    first = 0
    while running:
        pid, status = os.wait()
        running.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        if code and not first:
            first = code if code > 0 else 128 - code
            for other in running:
                os.kill(other, signal.SIGKILL)
    return first
