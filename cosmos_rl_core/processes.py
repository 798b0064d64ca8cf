"""Processes that end with their parent. ``python -m cosmos_rl_core.processes COMMAND...`` runs a command that does."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PARENT = "COSMOS_RL_PARENT_PID"
"""Environment variable with the id of the parent process. Not set when a person starts a stage by hand."""


def die_with_parent() -> None:
    """Make Linux kill this process when its parent ends, so that a killed torchrun or flow leaves no orphans.

    The setting survives ``exec`` but not ``fork``, so each process calls this and becomes the named parent of its own
    children. Does nothing for a process that a person started. On other systems only a parent that has already ended
    is noticed.
    """
    if PARENT not in os.environ:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before prctl was called.
    if int(os.environ[PARENT]) not in (os.getpid(), os.getppid()):
        os._exit(128 + signal.SIGKILL)
    os.environ[PARENT] = str(os.getpid())


if __name__ == "__main__":
    die_with_parent()
    os.execvp(sys.argv[1], sys.argv[1:])
