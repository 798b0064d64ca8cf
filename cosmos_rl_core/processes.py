"""This process: its end with its parent, its stacks, its age, and its traffic with stores.

``python -m cosmos_rl_core.processes COMMAND...`` runs a command that ends with its parent.
"""

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PR_SET_PDEATHSIG = 1
STACKS = signal.SIGUSR1
"""Signal by which a supervisor asks for the stacks of a process that hangs."""
PARENT = "COSMOS_RL_PARENT_PID"
"""Environment variable with the id of the parent process. Not set when a person starts a stage by hand."""
MEETING = "COSMOS_RL_MEETING"
"""Environment variable with the file at which ranks join their process group where there is no torchrun."""
HOST = "COSMOS_RL_MEETING_HOST"
"""Environment variable with the address of the node of rank 0, where the ranks are on several nodes. Then the file gets
the address at which they meet: rank 0 writes it, and supervisors carry it to the other nodes."""
BEGAN = "COSMOS_RL_BEGAN_S"
"""Environment variable with the time since the machine booted, in seconds, at which a process began its present
Request. Not set while a process has only one."""


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


def show_stacks_on_signal() -> None:
    """Make this process write the Python stacks of all its threads to standard error when it gets SIGUSR1.

    It does so whatever it is doing, also inside of a collective or another call that does not return.
    """
    # The log is given by its number: a process that serves several Requests opens another one in its place.
    faulthandler.register(STACKS, file=2, all_threads=True)


def become_rank(rank: int, count: int, meeting: Path, *, alone: bool = False, here: int = 0, host: str = "") -> None:
    """Set the variables of one of ``count`` ranks, which meet at a file that does not exist yet.

    ``alone``: this process sees no device but its own. ``here``: number of ranks on this machine, by default all;
    ``host``: address of the node of rank 0, if there are several nodes.
    """
    place = str(rank)
    os.environ |= {"RANK": place, "LOCAL_RANK": "0" if alone else place}
    os.environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(here or count), MEETING: str(meeting)}
    os.environ.pop(HOST, None)
    if host:
        os.environ[HOST] = host


def be_no_rank() -> None:
    """Undo :func:`become_rank` and :func:`begin_again`."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", MEETING, HOST, BEGAN):
        os.environ.pop(name, None)


def begin_again() -> None:
    """Count the age of this process from now on: it begins another Request."""
    os.environ[BEGAN] = repr(time.clock_gettime(time.CLOCK_BOOTTIME))


def age_s() -> float:
    """Return the seconds since this process began, or since torchrun began if it started this rank; 0.0 if unknown.

    In a process that serves several Requests, the seconds since it began the present one.
    """
    if BEGAN in os.environ:
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - float(os.environ[BEGAN]))
    pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    try:
        # The name, in brackets, may hold anything. Field 22 is the start in clock ticks since the machine booted.
        ticks = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK"))


class Traffic:
    """Bytes read from and written to stores, and seconds that the main thread waits for stores, services or threads.

    The counts are of the whole process and only grow: take a difference to measure a part.
    """

    def __init__(self) -> None:
        self.read_bytes = 0
        self.written_bytes = 0
        self.waited_s = 0.0
        """Seconds in which the main thread waited inside :meth:`waiting`."""
        self._since_s: float | None = None
        self._lock = threading.Lock()

    def add(self, *, read: int = 0, written: int = 0) -> None:
        """Count bytes. Any thread may call it."""
        with self._lock:
            self.read_bytes += read
            self.written_bytes += written

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the seconds inside as waiting: in the main thread only, and nested waits once."""
        if self._since_s is not None or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._since_s = time.monotonic()
        try:
            yield
        finally:
            self.waited_s += time.monotonic() - self._since_s
            self._since_s = None


TRAFFIC = Traffic()
"""The counts of this process."""


if __name__ == "__main__":
    die_with_parent()
    os.execvp(sys.argv[1], sys.argv[1:])
