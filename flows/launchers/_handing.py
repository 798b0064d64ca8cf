"""The units of an elastic stage, and the socket at which its workers ask for them."""

import json
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cosmos_rl_core.canonical import differences
from stages.execution.handing import FINISH, LEAVE, address_in

ANSWER_S = 1.0
"""Longest wait for an answer, in seconds. A worker that gets no units then asks again."""
TURN_S = 0.1
"""Interval in seconds between looks at questions that have no answer yet."""


class Units:
    """The units of a stage. Each of them waits, is with a worker, or is made. Not safe for several threads."""

    def __init__(self) -> None:
        self.count: int | None = None
        """Number of units; None until the first worker tells it."""
        self.made: set[int] = set()
        self.losses: Counter[int] = Counter()
        """For each unit, the number of workers that were lost while they had it."""
        self._waiting: deque[int] = deque()
        self._with: dict[int, list[int]] = {}
        self._last: int | None = None
        """The worker that makes the artifact of all units."""

    @property
    def wait(self) -> bool:
        """Return whether there is something that another worker could do."""
        return self.count is None or bool(self._waiting) or (self.all_made and self._last is None)

    @property
    def all_made(self) -> bool:
        """Return whether all units are made."""
        return self.count is not None and len(self.made) == self.count

    def of(self, worker: int) -> list[int]:
        """Return the units that a worker has and has not made yet."""
        return self._with.get(worker, [])

    def take(self, worker: int, most: int, count: int) -> list[int] | str:
        """Return up to ``most`` units for a worker; none while other workers make the last ones.

        Once all ``count`` units are made, return FINISH for the worker that makes the artifact, LEAVE for the others.
        A unit with which a worker was lost is handed out alone, so that a second loss shows whether it is the reason.
        Raises ``ValueError`` if workers disagree on ``count``.
        """
        if self.count is None:
            self.count = count
            self._waiting.extend(range(count))
        if count != self.count:
            raise ValueError(f"worker {worker} cuts the work into {count} units, and others cut it into {self.count}")
        if self.all_made:
            if self._last in (None, worker):
                self._last = worker
                return FINISH
            return LEAVE
        has = self._with.setdefault(worker, [])
        found: list[int] = []
        while self._waiting and len(found) < most:
            alone = self.losses[self._waiting[0]] > 0
            if any(self.losses[unit] for unit in has) or (alone and (has or found)):
                break
            found.append(self._waiting.popleft())
            if alone:
                break
        has += found
        return found

    def finish(self, worker: int, unit: int) -> None:
        """Record that a worker has made a unit."""
        if unit in self.of(worker):
            self._with[worker].remove(unit)
        self.made.add(unit)

    def give_back(self, worker: int, *, lost: bool) -> list[int]:
        """Free the units of a worker that has ended, and return them. With ``lost``, count a loss for each."""
        units = self._with.pop(worker, [])
        self._waiting.extendleft(reversed(units))
        self.losses.update(units if lost else ())
        self._last = None if self._last == worker else self._last
        return units


@dataclass
class _Worker:
    """A connection of a rank of a worker."""

    number: int = 0
    read: bytes = b""
    asks: tuple[int, int] | None = None
    """Number of units that it waits for, and how many there are in all."""
    asked_s: float = 0.0


@dataclass
class Handing:
    """A thread that hands out units at the socket in a folder."""

    folder: Path
    numerics: dict[str, Any] | None = None
    """Numerics that every worker must have; None takes the first worker's."""
    units: Units = field(default_factory=Units)
    gave_back: set[int] = field(default_factory=set[int])
    """Workers that were asked to end and gave back their units."""
    left: set[int] = field(default_factory=set[int])
    """Workers that were told that they have nothing more to do."""
    asked: set[int] = field(default_factory=set[int])
    """Workers that have asked for units at least once."""
    waiting: set[int] = field(default_factory=set[int])
    """Workers that have asked for units and got none yet."""
    mistake: str = ""
    """Why the units cannot be handed out."""
    unlike: list[str] = field(default_factory=list[str])
    """A message for each worker with other numerics, with the differences."""
    guard: threading.Lock = field(default_factory=threading.Lock)
    """Lock for others that read these fields while the thread works."""

    def __post_init__(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        with address_in(self.folder) as address:
            self._listener.bind(address)
        self._listener.listen()
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._connected: dict[socket.socket, _Worker] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="units", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and all connections."""
        self._closed.set()
        self._thread.join()
        for one in (*self._connected, self._listener):
            one.close()
        self._selector.close()

    def _serve(self) -> None:
        while not self._closed.is_set():
            for key, _ in self._selector.select(TURN_S):
                found = key.fileobj
                assert isinstance(found, socket.socket)
                if found is self._listener:
                    self._accept()
                else:
                    self._read(found)
            with self.guard:
                for one, worker in self._connected.items():
                    self._answer(one, worker)

    def _accept(self) -> None:
        connected, _ = self._listener.accept()
        self._connected[connected] = _Worker()
        self._selector.register(connected, selectors.EVENT_READ)

    def _read(self, one: socket.socket) -> None:
        worker, data = self._connected[one], b""
        with suppress(ConnectionError):
            data = one.recv(65536)
        if not data:
            # How the worker ended is read from its process.
            self._selector.unregister(one)
            del self._connected[one]
            one.close()
            return
        *lines, worker.read = (worker.read + data).split(b"\n")
        with self.guard:
            for line in lines:
                self._take(one, worker, json.loads(line))

    def _take(self, one: socket.socket, worker: _Worker, message: dict[str, Any]) -> None:
        match message:
            case {"worker": number}:
                worker.number = number
            case {"numerics": found}:
                self.numerics = found if self.numerics is None else self.numerics
                unlike = ", ".join(differences(self.numerics, found))
                if unlike:
                    self.left.add(worker.number)
                    self.unlike.append(f"worker {worker.number}: {unlike}")
                _send(one, unlike)
            case {"ask": most, "of": count}:
                worker.asks, worker.asked_s = (most, count), time.monotonic()
                self.asked.add(worker.number)
                self.waiting.add(worker.number)
            case {"made": unit}:
                self.units.finish(worker.number, unit)
            case {"gives_back": True}:
                self.gave_back.add(worker.number)
            case _:
                raise AssertionError(f"a worker says {message}")

    def _answer(self, one: socket.socket, worker: _Worker) -> None:
        if worker.asks is None:
            return
        try:
            found = self.units.take(worker.number, *worker.asks)
        except ValueError as error:
            self.mistake, found = str(error), LEAVE
        if found or time.monotonic() - worker.asked_s > ANSWER_S:
            worker.asks = None
            if found:
                self.waiting.discard(worker.number)
            if found == LEAVE:
                self.left.add(worker.number)
            _send(one, found)


def _send(one: socket.socket, answer: Sequence[int] | str) -> None:
    # A worker that has ended gets no answer.
    with suppress(ConnectionError):
        one.sendall(json.dumps(answer).encode() + b"\n")
