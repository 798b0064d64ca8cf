"""Processes that do not outlive their parent. ``python -m cosmos_rl_core.processes COMMAND...`` runs a command so."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PARENT = "COSMOS_RL_PARENT_PID"
"""Environment variable: the process that this one must not outlive. Absent where a person starts a stage by hand."""


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies: a torchrun or a flow that is shot leaves no orphan.

    Survives ``exec``, not ``fork``: each process asks for itself, and is the parent that its own children name.
    Nothing is asked for elsewhere than on Linux, or of a process that a person started.
    """
    if PARENT not in os.environ:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # A parent that died before the request is noticed here.
    if int(os.environ[PARENT]) not in (os.getpid(), os.getppid()):
        os._exit(128 + signal.SIGKILL)
    os.environ[PARENT] = str(os.getpid())


if __name__ == "__main__":
    die_with_parent()
    os.execvp(sys.argv[1], sys.argv[1:])
