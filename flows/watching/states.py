"""The state of one stage of a run."""

from dataclasses import dataclass
from typing import Literal

from flows.planning.steps import Step
from stages.artifacts.manifest import Manifest, seconds_of

Word = Literal["stands", "stale", "waits", "damaged", "invalidated", "missing", "running", "failed", "interrupted"]
"""``stands``: finished and up to date. ``stale``: would be made again. ``waits``: an input does not stand, so it is not
known yet. ``damaged``: a file has wrong bytes. ``invalidated``: its generation was ended. ``missing``: never made.
``interrupted``: the process that made it ended."""


@dataclass(frozen=True)
class State:
    """One stage."""

    step: Step
    word: Word
    generation: int = 1
    manifest: Manifest | None = None
    why: str = ""
    """Reason of ``stale``, ``damaged`` or ``failed``."""
    logs: int = 0
    """Number of attempts that left a log."""
    folders: int = 0
    """Number of attempts that wrote files."""

    @property
    def attempts(self) -> int:
        """Return the number of attempts that left a log or files, of ended generations too, and the running one."""
        return max(self.folders, self.logs + (self.word == "running"))

    @property
    def seconds(self) -> float | None:
        """Return the seconds that the artifact took; None without an artifact, or if it did not record them."""
        return seconds_of(self.manifest)

    @property
    def reward(self) -> float | None:
        """Return the mean score; None for a stage without scores."""
        return self._number(self.step.stage.partition("-")[2])

    @property
    def loss(self) -> float | None:
        """Return the held-out loss; None for a stage other than ``validate``, and if it is not finite."""
        return self._number("loss") if self.step.stage == "validate" else None

    def _number(self, name: str) -> float | None:
        summary = {} if self.manifest is None else self.manifest.summary
        found = summary.get(name)
        return found if isinstance(found, float) else None
