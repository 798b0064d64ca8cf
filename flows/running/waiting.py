"""What a flow does while it cannot start a stage: tell why, and go on asking."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Waiting:
    """One wait, for whatever reasons follow one another."""

    note: Callable[[str], None]
    """Tells people."""
    check: Callable[[], None]
    """Raises if the work must stop, for example because its lease is lost."""
    why: str = ""
    """The reason that was told last."""

    def turn(self, why: str, seconds: float) -> None:
        """Tell a reason that is new, wait, and raise if the work must stop."""
        if why != self.why:
            self.note(why)
        self.why = why
        time.sleep(seconds)
        self.check()
