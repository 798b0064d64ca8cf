"""Hold a command right before the n-th change of files in a place, to kill one of its processes there or soon after."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

HOOK = Path(__file__).with_name("hook")
ORDER = "COSMOS_FLOWS_TEST_HOLD"


@dataclass(frozen=True)
class Reached:
    """The moment that was reached."""

    pid: int
    event: str
    path: str


class Hold:
    """An order for all processes of one command. Use each object for one command only."""

    def __init__(self, folder: Path, pattern: str, at: int) -> None:
        """Hold before change ``at`` (from 1) of paths that match ``pattern``; 0 only counts them."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._folder = folder
        order = {"folder": str(folder), "pattern": pattern, "at": at}
        path = os.pathsep.join([str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment = {ORDER: json.dumps(order), "PYTHONPATH": path}

    @property
    def count(self) -> int:
        """Changes so far."""
        path = self._folder / "count"
        return path.stat().st_size if path.exists() else 0

    def reached(self) -> Reached | None:
        """The moment, once a process waits there."""
        path = self._folder / "held.json"
        return Reached(**json.loads(path.read_bytes())) if path.exists() else None

    def release(self) -> None:
        """Let the process go on."""
        (self._folder / "go").touch()
