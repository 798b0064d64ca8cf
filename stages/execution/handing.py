"""A worker's side of an elastic stage: it gets units from the launcher over a socket, and reports finished ones.

Messages are lines of JSON. A worker asks for units when it has room for them, so that it encodes and writes one while
it makes the next. Its first rank asks, and tells the other ranks; each rank reports the units that it made.
"""

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from stages.execution.context import Ranks

ADDRESS = "units"
"""Name of the socket in the folder of a stage."""
FINISH, LEAVE = "finish", "leave"
"""Answers in place of units when all are made: to the worker that makes the artifact, and to all other workers."""
ENDED = 128 + signal.SIGTERM
"""Exit code of a worker that gave its units back on SIGTERM."""


class LeftError(Exception):
    """Raised in a worker that has nothing more to do, because all units are made or it may not make any."""


class HandedUnits:
    """The units that one worker gets. Every rank of the worker has one."""

    def __init__(self, folder: Path, worker: int, ranks: Ranks, numerics: dict[str, Any]) -> None:
        """Connect to the launcher. Raises :class:`LeftError` if other workers have other numerics.

        SIGTERM, by which machines are taken away, ends this process and gives the worker's units back. Collective.
        """
        self._ranks, self._guard = ranks, threading.Lock()
        self._socket = connected(folder)
        self._lines = self._socket.makefile("rb")
        self._say({"worker": worker})
        self._before = signal.signal(signal.SIGTERM, self._give_back)
        self._unlike: str = ranks.broadcast(self._ask({"numerics": numerics}) if ranks.rank == 0 else "")
        if self._unlike:
            self.close()
            raise LeftError(f"this worker makes no units: {self._unlike}")

    def hands(self, count: int, at_once: int) -> Iterator[list[int]]:
        """Yield numbers of ``count`` units for the ranks of this worker, at most ``at_once`` each, until all are made.

        Then the worker that makes the artifact goes on. Raises :class:`LeftError` in all other workers. Collective.
        """
        asks = {"ask": at_once * self._ranks.world_size, "of": count}
        while True:
            answer = self._ranks.broadcast(self._ask(asks) if self._ranks.rank == 0 else None)
            if answer == LEAVE:
                raise LeftError("all units are made")
            if answer == FINISH:
                return
            if answer:
                yield answer

    def made(self, number: int) -> None:
        """Tell the launcher that a unit is in the store. Any thread may."""
        self._say({"made": number})

    def close(self) -> None:
        """Leave the launcher, and restore the former handler of SIGTERM."""
        signal.signal(signal.SIGTERM, self._before)
        self._lines.close()
        self._socket.close()

    def _say(self, message: dict[str, Any]) -> None:
        with self._guard:
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _ask(self, message: dict[str, Any]) -> Any:
        self._say(message)
        line = self._lines.readline()
        if not line:
            raise ConnectionError("the launcher that hands out units has ended")
        return json.loads(line)

    def _give_back(self, number: int, frame: FrameType | None) -> None:
        # Without the guard, which the interrupted thread may hold; a line as short as this is sent as a whole.
        self._socket.send(b'{"gives_back": true}\n')
        os._exit(ENDED)


def connected(folder: Path) -> socket.socket:
    """Return a socket that is connected to the launcher that listens in a folder."""
    found = socket.socket(socket.AF_UNIX)
    with address_in(folder) as address:
        found.connect(address)
    return found


@contextmanager
def address_in(folder: Path) -> Iterator[str]:
    """Yield the address of the socket in a folder. It is short enough for the system, however long the path is."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{opened}/{ADDRESS}"
    finally:
        os.close(opened)
