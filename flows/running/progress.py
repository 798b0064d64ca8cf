"""Progress of a run in its store, ``progress.json``, for ``cosmos-flows status``.

Nothing depends on this file. The lease tells who works on a run, and the manifests tell what is current.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal, Self

from pydantic import Field, ValidationError

from cosmos_rl_core.config.base import Section
from cosmos_rl_core.errors import ApprovalError, ArtifactError, BudgetError, CosmosRLError, StoppedError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import seal, unseal
from flows.devices.staying import Processes
from stages.execution.outcome import Status
from stages.execution.spending import Crew

INTERVAL_S = 2.0
"""Interval in seconds at which the progress of a wave is written."""
FILE = "progress.json"
KIND = "progress"

NOT_REPORTED = Status(sequence=0, phase="", step=0, total=0)

End = Literal["", "done", "failed", "stopped", "suspended", "limited"]
"""``stopped``: by Ctrl-C, a cancellation or a signal. ``suspended``: until somebody approves a warning. ``limited``: by
``train.max_gpu_hours``. Empty while the process works, or after it was killed."""


class Progress(Section):
    """Progress of the process that works on a run, or of the last one."""

    wave: str = ""
    """Name of the wave, as in the flow's task: ``iteration-0003/reward-jpeg+reward-ocr``; empty between waves."""
    phase: str = ""
    step: int = Field(default=0, ge=0)
    total: int = Field(default=0, ge=0)
    """Steps done of ``total`` in the phase, for the slowest stage of the wave."""
    seconds: float = Field(default=0.0, ge=0)
    """Seconds since the wave began, with retries and waiting for a machine."""
    crew: Crew | None = None
    """The workers of that stage, if it is elastic."""
    processes: Processes = Processes()
    """Processes that stay between stages; empty after the end of the run's own process."""
    iterations: int = Field(default=0, ge=0)
    """Iterations that the process takes the run to, which may be more than were planned; 0 if that is not known."""
    written: float = Field(default=0.0, ge=0)
    """When this was written, in seconds since 1970 by the clock of its process; 0 if that is not known."""
    end: End = ""
    error: str = ""
    """The whole message of the failure."""


class Reporter:
    """A writer of a run's progress, from ``with`` to its end. Failures to write are ignored.

    ``is_made``, if it is given, is called when the work ends well. If it returns False, the process made only a part of
    the run: then the progress from before is written again, else ``done``. ``iterations`` is the number of iterations
    to which the process takes the run.
    """

    def __init__(self, run_url: str, is_made: Callable[[], bool] | None = None, iterations: int = 0) -> None:
        self._run_url, self._url = run_url, store.join(run_url, FILE)
        self._is_made, self._iterations = is_made, iterations
        self._before: Progress | None = None
        self._now = Progress()
        self.processes: Callable[[], Processes] = Processes
        """Returns the processes that stay between the stages of the run."""
        self._wave_s = self._written_s = time.monotonic()

    def __enter__(self) -> Self:
        if self._is_made is not None:
            with suppress(CosmosRLError):
                self._before = read_progress(self._run_url)
        self._write()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._now = self._ended_well()
        else:
            end: End = "failed" if isinstance(error, Exception) else "stopped"
            end = "suspended" if isinstance(error, ApprovalError) else end
            end = "limited" if isinstance(error, BudgetError) else end
            end = "stopped" if isinstance(error, StoppedError) else end
            why = str(error) or type(error).__name__
            self._now = self._now.model_copy(update={"end": end, "error": why, "processes": Processes()})
        self._write()

    def _ended_well(self) -> Progress:
        with suppress(CosmosRLError):
            if self._is_made is not None and self._before is not None and not self._is_made():
                return self._before
        return Progress(end="done")

    def working(self, wave: str, statuses: Sequence[Status]) -> None:
        """Write the progress of a wave. Cheap enough to call many times a second."""
        now_s = time.monotonic()
        if wave != self._now.wave:
            self._wave_s = now_s
        elif now_s - self._written_s < INTERVAL_S:
            return
        slowest, seconds = slowest_of(statuses), round(now_s - self._wave_s, 1)
        at = slowest.model_dump(include={"phase", "step", "total"})
        self._now = Progress(wave=wave, seconds=seconds, processes=self.processes(), crew=slowest.crew, **at)
        self._write()

    def done(self) -> None:
        """Clear the wave. The next write follows at once with the next wave."""
        self._now = Progress()

    def _write(self) -> None:
        self._written_s = time.monotonic()
        iterations = max(self._iterations, self._now.iterations)
        said = self._now.model_copy(update={"iterations": iterations, "written": round(time.time(), 1)})
        with suppress(CosmosRLError):
            store.write(self._url, seal(KIND, said.model_dump(mode="json")))


def slowest_of(statuses: Sequence[Status]) -> Status:
    """Return the status with the least progress in its phase, :data:`NOT_REPORTED` without any."""
    return min(statuses, key=lambda status: status.step / max(status.total, 1), default=NOT_REPORTED)


def read_progress(run_url: str) -> Progress | None:
    """Return the last progress of a run; None if it is absent or cannot be read."""
    url = store.join(run_url, FILE)
    data = store.read_if_exists(url)
    try:
        return None if data is None else Progress.model_validate(unseal(data, KIND, url))
    except (ArtifactError, ValidationError):
        return None
