"""A network of its own for servers that listen on every address."""

import ctypes
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

START_S = 120.0
SETTINGS = (
    ["ip", "link", "set", "lo", "up"],
    # Without another address than 127.0.0.1, programs that ask for addresses in use (AI_ADDRCONFIG) find no name.
    ["ip", "address", "add", "10.99.0.1/32", "dev", "lo"],
)


class Network:
    """The network of a process that sleeps, with nothing but addresses of its own."""

    def __init__(self) -> None:
        self._sleeper = subprocess.Popen(["unshare", "-n", "sleep", "infinity"])
        deadline_s = time.monotonic() + START_S
        while os.readlink(f"/proc/{self._sleeper.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        for command in SETTINGS:
            subprocess.run([*self.inside, *command], check=True)

    @property
    def inside(self) -> list[str]:
        """The words before a command that runs in it."""
        return ["nsenter", "-t", str(self._sleeper.pid), "-n"]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be in it, with this thread and what it starts."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as before, open(f"/proc/{self._sleeper.pid}/ns/net") as there:
            assert libc.setns(there.fileno(), 0) == 0
            try:
                yield
            finally:
                assert libc.setns(before.fileno(), 0) == 0

    def close(self) -> None:
        """End it."""
        self._sleeper.kill()
        self._sleeper.wait()
