"""Seconds of one attempt of a stage, by their use, and the bytes that it read and wrote."""

import time
from collections.abc import Sequence
from typing import Literal

from cosmos_rl_core.config.base import Section
from cosmos_rl_core.processes import TRAFFIC, age_s

Part = Literal["interpreter", "imports", "load", "first_step", "busy"]
_BEFORE_WORK = ("starting", "reading ")
"""Beginnings of the phases in which a stage has not begun its own work."""


class Spent(Section):
    """The seconds of the first rank's process, which add up to its life, and the bytes of all ranks."""

    interpreter_s: float = 0.0
    """Seconds from the start of the process, or of torchrun, until its first line: Python, and what every stage
    imports. A process that has served another Request counts them from the order of this one."""
    imports_s: float = 0.0
    """Seconds in which it imports the stage's own libraries and joins the process group."""
    load_s: float = 0.0
    """Seconds from the end of the imports to the first step of its work: inputs, weights, adopted shards."""
    first_step_s: float = 0.0
    """Seconds of the first step of its work, with everything that happens once, such as compilation."""
    busy_s: float = 0.0
    """Seconds of all its other steps."""
    waiting_s: float = 0.0
    """Seconds since its work began in which it waited for the store or for a reward service."""
    read_bytes: int = 0
    written_bytes: int = 0
    """Bytes read from the store and written to it, without the bytes of processes that the stage starts."""

    @property
    def seconds(self) -> float:
        """Return the sum of all seconds."""
        return self.startup_s + self.busy_s + self.waiting_s

    @property
    def startup_s(self) -> float:
        """Return the seconds of the start-up, including the first step."""
        return self.interpreter_s + self.imports_s + self.load_s + self.first_step_s


class Crew(Section):
    """The workers of one attempt of an elastic stage."""

    workers: int
    """Number of workers now."""
    largest: int
    """Most workers at once."""
    units: int
    of: int
    """Numbers of units that are made, and of all units; 0 until it is known."""
    lost: int = 0
    """Workers that ended unexpectedly; each lost the units that it had."""
    gave_back: int = 0
    """Workers that were asked to end, and gave their units back."""
    worker_s: float = 0.0
    """Seconds of all workers."""

    @property
    def ended(self) -> str:
        """Return how many workers ended before the stage did, in words that continue a line; "" for none."""
        lost, gave_back = f", {self.lost} lost", f", {self.gave_back} gave their units back"
        return lost * (self.lost > 0) + gave_back * (self.gave_back > 0)


def together(spent: Sequence[Spent]) -> Spent:
    """Return the seconds of the longest of several processes, with the bytes of all of them."""
    longest = max(spent, key=lambda one: one.seconds, default=Spent())
    read, written = sum(one.read_bytes for one in spent), sum(one.written_bytes for one in spent)
    return longest.model_copy(update={"read_bytes": read, "written_bytes": written})


class Clock:
    """The clock of one process of a stage, from the start of the process or of its present Request."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {"interpreter": age_s()}
        self._part: Part = "imports"
        self._first: tuple[str, int] | None = None
        """Phase and step in which the work began."""
        self._waited_s = 0.0
        self._seen_s, self._seen_waited_s = time.monotonic(), TRAFFIC.waited_s
        self._before = TRAFFIC.read_bytes, TRAFFIC.written_bytes
        self._others = [0, 0]

    def turn(self, part: Part) -> None:
        """Count the seconds since the last call for the present part, and begin another part."""
        now_s, waited_s = time.monotonic(), TRAFFIC.waited_s
        elapsed_s, waited_s = now_s - self._seen_s, waited_s - self._seen_waited_s
        if self._part in ("first_step", "busy"):
            elapsed_s -= waited_s
            self._waited_s += waited_s
        self._spent[self._part] = self._spent.get(self._part, 0.0) + elapsed_s
        self._part, self._seen_s, self._seen_waited_s = part, now_s, self._seen_waited_s + waited_s

    def saw(self, phase: str, step: int) -> None:
        """Note progress, which shows when the work began and when its first step was done."""
        if self._part == "load" and not phase.startswith(_BEFORE_WORK):
            self._first = phase, step
            self.turn("first_step")
        elif self._part == "first_step" and (phase, step) != self._first:
            self.turn("busy")

    def moved(self) -> list[int]:
        """Return the bytes that this process has read and written since the clock began."""
        return [TRAFFIC.read_bytes - self._before[0], TRAFFIC.written_bytes - self._before[1]]

    def finished(self, others: Sequence[Sequence[int]] = ()) -> None:
        """Note the end of the work, and the bytes that the other ranks read and wrote."""
        if self._part == "load":
            # A stage without steps: all that it did was its work.
            self.turn("busy")
            self._spent["busy"] = self._spent.pop("load")
        for read, written in others:
            self._others = [self._others[0] + read, self._others[1] + written]

    def spent(self) -> Spent:
        """Return the seconds and bytes that were spent until now."""
        self.turn(self._part)
        seconds = {f"{part}_s": round(found, 3) for part, found in self._spent.items()}
        read, written = (mine + theirs for mine, theirs in zip(self.moved(), self._others, strict=True))
        return Spent(**seconds, waiting_s=round(self._waited_s, 3), read_bytes=read, written_bytes=written)
