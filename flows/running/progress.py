"""What a run says of itself in its store while a process works on it: ``progress.json``, for ``cosmos-flows status``.

Nothing is decided by it. Who works on a run is the lease's to say, and what stands the manifests'.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Literal, Self

from pydantic import Field, ValidationError

from cosmos_rl_core.config.base import Section
from cosmos_rl_core.errors import ArtifactError, CosmosRLError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import seal, unseal
from stages.execution.outcome import Status

INTERVAL_S = 2.0
"""Between two writes that say no more than how far a wave is."""
FILE = "progress.json"
KIND = "progress"

End = Literal["", "done", "failed", "stopped"]
"""``stopped``: by Ctrl-C, a cancellation or a signal. Empty while it works, and for ever if it was killed."""


class Progress(Section):
    """Where the process that works on a run is, or was when it ended."""

    wave: str = ""
    """Name of the wave, as in the flow's task: ``iteration-0003/reward-jpeg+reward-ocr``; empty between waves."""
    phase: str = ""
    step: int = Field(default=0, ge=0)
    total: int = Field(default=0, ge=0)
    """``step`` of ``total`` done in the phase, of the slowest stage of the wave."""
    seconds: float = Field(default=0.0, ge=0)
    """Since the wave began, retries and waiting for a machine included."""
    end: End = ""
    error: str = ""
    """Why it failed, whole."""


class Reporter:
    """Writes a run's progress, between ``with`` and its end; a store that does not take it keeps nothing up."""

    def __init__(self, run_url: str) -> None:
        self._url = store.join(run_url, FILE)
        self._now = Progress()
        self._wave_s = self._written_s = time.monotonic()

    def __enter__(self) -> Self:
        self._write()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._now = Progress(end="done")
        else:
            end: End = "failed" if isinstance(error, Exception) else "stopped"
            why = str(error) or type(error).__name__
            self._now = self._now.model_copy(update={"end": end, "error": why})
        self._write()

    def working(self, wave: str, statuses: Sequence[Status]) -> None:
        """A wave is at work; called many times a second."""
        now_s = time.monotonic()
        if wave != self._now.wave:
            self._wave_s = now_s
        elif now_s - self._written_s < INTERVAL_S:
            return
        at = {"seconds": round(now_s - self._wave_s, 1), "wave": wave}
        if statuses:
            slowest = slowest_of(statuses)
            at |= {"phase": slowest.phase, "step": slowest.step, "total": slowest.total}
        self._now = Progress.model_validate(at)
        self._write()

    def done(self) -> None:
        """The wave stands. Written with the next one, which follows at once."""
        self._now = Progress()

    def _write(self) -> None:
        self._written_s = time.monotonic()
        with suppress(CosmosRLError):
            store.write(self._url, seal(KIND, self._now.model_dump(mode="json")))


def slowest_of(statuses: Sequence[Status]) -> Status:
    """The one that has most of its phase before it."""
    return min(statuses, key=lambda status: status.step / max(status.total, 1))


def read_progress(run_url: str) -> Progress | None:
    """What the run said last; None if it never did, or it cannot be read."""
    url = store.join(run_url, FILE)
    data = store.read_if_exists(url)
    try:
        return None if data is None else Progress.model_validate(unseal(data, KIND, url))
    except (ArtifactError, ValidationError):
        return None
