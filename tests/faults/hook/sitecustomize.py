"""Holds a process right before one change of files; :mod:`tests.faults.held` puts this folder on ``PYTHONPATH``.

Python imports it at its start, so every process of a command has it, forks included.
"""

import json
import os
import re
import sys
import time
from typing import Any

CHANGES = {"os.link": 1, "os.rename": 1, "os.remove": 0, "os.rmdir": 0, "os.mkdir": 0, "os.truncate": 0}
"""Events of Python's audit that change files, and which of their arguments is the path that changes."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
LONGEST_S = 60.0
"""A controller that was killed holds nobody for ever."""


class Holder:
    """Counts changes below a place, over all processes of a command, and waits before one of them."""

    def __init__(self, folder: str, pattern: str, at: int) -> None:
        self._count, self._held, self._go = (os.path.join(folder, name) for name in ("count", "held.json", "go"))
        self._at = at
        self._pattern = re.compile(pattern)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            if not isinstance(arguments[2], int) or not arguments[2] & WRITES:
                return
            path = arguments[0]
        elif event in CHANGES:
            path = arguments[CHANGES[event]]
        else:
            return
        if not isinstance(path, str | bytes | os.PathLike):
            return
        found = os.path.abspath(os.fsdecode(path))
        if self._pattern.search(found) and self._number() == self._at:
            self._hold(event, found)

    def _number(self) -> int:
        """From 1 on; each process appends a byte, so no two get the same."""
        file = os.open(self._count, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, b".")
            return os.lseek(file, 0, os.SEEK_CUR)
        finally:
            os.close(file)

    def _hold(self, event: str, path: str) -> None:
        temporary = f"{self._held}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump({"pid": os.getpid(), "event": event, "path": path}, file)
        os.rename(temporary, self._held)
        end_s = time.monotonic() + LONGEST_S
        while not os.path.exists(self._go) and time.monotonic() < end_s:
            time.sleep(0.005)


if (asked := os.environ.get("COSMOS_FLOWS_TEST_HOLD")) is not None:
    sys.addaudithook(Holder(**json.loads(asked)).hear)
