"""Processes that do not outlive their parent. ``python -m cosmos_rl_core.processes COMMAND...`` runs a command so."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies: a torchrun or a flow that is shot leaves no orphan.

    Survives ``exec``, not ``fork``: each process asks for itself. Elsewhere than on Linux this does nothing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent()
    os.execvp(sys.argv[1], sys.argv[1:])
