"""Files of a stage process for its supervisor: ``status.json`` while it runs, ``error.<rank>.json`` when it fails.

Files survive every end of a process. Exit codes do not suffice: torchrun exits with 1 for every failure of a worker.
"""

import os
import time
import traceback
from pathlib import Path
from typing import TypeVar

from pydantic import Field, ValidationError

from cosmos_rl_core.config.base import Section
from cosmos_rl_core.errors import EXIT_CODES, RETRYABLE_KINDS, CosmosRLError, no_space
from cosmos_rl_core.foreign_errors import is_out_of_memory
from stages.execution.spending import Clock, Crew, Spent

STATUS = "status.json"
STATUS_INTERVAL_S = 0.2

Said = TypeVar("Said", bound=Section)


class Status(Section):
    """Progress of a stage. ``sequence`` grows with each write, so that a supervisor needs no clock but its own."""

    sequence: int
    phase: str
    step: int
    total: int
    notes: tuple[str, ...] = ()
    """Lines for people, for example on adopted shards, or on an artifact that is made again and the reason."""
    spent: Spent = Spent()
    """Seconds and bytes until now."""
    crew: Crew | None = None
    """The workers of an elastic stage."""


class Failure(Section):
    """The reason why one rank failed."""

    kind: str
    message: str
    retryable: bool
    collective: bool = False
    """Whether the error only reports the loss of another rank."""
    traceback: str = Field(default="", repr=False)
    raised: str = ""
    """Class of the exception, if it is of no known kind."""
    frame: str = ""
    """Last frame of the exception, if it is of no known kind: file, line and function."""
    rank: int = 0

    @property
    def exit_code(self) -> int:
        """Return the exit code of the runner."""
        return EXIT_CODES.get(self.kind, 70)


class Outcome:
    """A writer of one process's files in a local directory."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory = directory
        self.rank = rank
        self.clock = Clock()
        self._notes: list[str] = []
        self._sequence = 0
        self._at = ("", 0, 0)
        self._written_s = 0.0
        directory.mkdir(parents=True, exist_ok=True)

    def note(self, message: str) -> None:
        """Print a line for people and add it to the status."""
        message = _encodable(message)
        print(message, flush=True)
        self._notes.append(message)
        self._write()

    def progress(self, phase: str, step: int, total: int) -> None:
        """Report that ``step`` of ``total`` steps of this phase are done.

        Written at most every 0.2 s, and at the start and the end of each phase.
        """
        self.clock.saw(phase, step)
        now_s = time.monotonic()
        turned = phase != self._at[0] or (step in (0, total) and step != self._at[1])
        if not turned and now_s - self._written_s < STATUS_INTERVAL_S:
            return
        self._at, self._written_s = (phase, step, total), now_s
        self._write()

    def finish(self) -> None:
        """Report the end of the process, whether it failed or not."""
        self._write()

    def _write(self) -> None:
        if self.rank != 0:
            return
        self._sequence += 1
        phase, step, total = self._at
        spent, notes = self.clock.spent(), tuple(self._notes)
        status = Status(sequence=self._sequence, phase=phase, step=step, total=total, notes=notes, spent=spent)
        self.show(status)

    def show(self, status: Status) -> None:
        """Write a status."""
        _replace(self.directory / STATUS, status.model_dump_json())

    def failed(self, failure: Failure) -> None:
        """Write this rank's error file."""
        failure = failure.model_copy(update={"rank": self.rank})
        _replace(self.directory / f"error.{self.rank}.json", failure.model_dump_json())

    def wait_for_reason(self, timeout_s: float) -> None:
        """Wait until some rank has reported more than the loss of another rank, for ``timeout_s`` at most."""
        deadline_s = time.monotonic() + timeout_s
        while not has_reason(self.directory) and time.monotonic() < deadline_s:
            time.sleep(STATUS_INTERVAL_S)


def failure_of(error: BaseException, *, collective: bool = False) -> Failure:
    """Classify an exception: our own errors have a kind; memory, settings and absent services are recognised.

    An exhausted memory is never counted as a lost rank, even if it occurred in a collective.
    """
    trace = _encodable("".join(traceback.format_exception(error)))
    error = no_space(error) or error
    if isinstance(error, CosmosRLError):
        kind, collective = error.kind, False
    elif is_out_of_memory(error):
        kind, collective = "out_of_memory", False
    elif isinstance(error, ValidationError):
        kind = "config"
    elif isinstance(error, (ConnectionError, TimeoutError)):
        kind = "unavailable"
    else:
        kind = "crash"
    text = _encodable(str(error) if isinstance(error, CosmosRLError) else f"{type(error).__name__}: {error}")
    found = Failure(kind=kind, message=text, retryable=kind in RETRYABLE_KINDS, collective=collective, traceback=trace)
    return found.model_copy(update=_place(error)) if kind == "crash" else found


def _encodable(text: str) -> str:
    """Escape lone surrogates, which no file can hold: names of files that are no UTF-8 have them."""
    return text.encode(errors="backslashreplace").decode()


def _place(error: BaseException) -> dict[str, str]:
    """Return the class of an exception and its last frame."""
    frames = traceback.extract_tb(error.__traceback__)
    last = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return {"raised": type(error).__name__, "frame": last}


def read_status(directory: Path) -> Status | None:
    """Return the newest status; None before the first, or if it cannot be read."""
    return _read(directory / STATUS, Status)


def read_failures(directory: Path) -> list[Failure]:
    """Return all readable error files, the most informative first: reasons before lost ranks, known kinds before
    crashes."""
    found = (_read(path, Failure) for path in sorted(directory.glob("error.*.json")))
    failures = [failure for failure in found if failure is not None]
    return sorted(failures, key=lambda failure: (failure.collective, failure.kind == "crash"))


def has_reason(directory: Path) -> bool:
    """Return whether some rank has reported more than the loss of another rank."""
    return any(not failure.collective for failure in read_failures(directory))


def _read(path: Path, kind: type[Said]) -> Said | None:
    try:
        return kind.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def _replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
