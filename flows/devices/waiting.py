"""Waits of a flow for devices, concurrency slots of a limit, or Resume."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Waiting:
    """One wait, whose reason may change."""

    note: Callable[[str], None]
    """Prints a line for people."""
    check: Callable[[], None]
    """Raises if the work must stop, for example because its lease is lost."""
    give_back: Callable[[], None] = lambda: None
    """Frees the devices that idle processes of this flow keep, for which others may wait."""
    why: str = ""
    """The last printed reason."""

    def turn(self, why: str, seconds: float) -> None:
        """Print a new reason, call ``give_back``, sleep, and call ``check``, which raises if the work must stop."""
        if why != self.why:
            self.note(why)
        self.give_back()
        self.why = why
        time.sleep(seconds)
        self.check()
