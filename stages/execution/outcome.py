"""What a stage process leaves for its supervisor: ``status.json`` while it runs, ``error.<rank>.json`` when it fails.

Files, because nothing else survives every way a process can end: torchrun turns each worker's failure into exit code 1.
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

STATUS_INTERVAL_S = 0.2

Said = TypeVar("Said", bound=Section)


class Status(Section):
    """Where a stage is. ``sequence`` grows with every sign of life; a supervisor needs no clock but its own."""

    sequence: int
    phase: str
    step: int
    total: int
    notes: tuple[str, ...] = ()
    """What people should be told: what was adopted, what was made again and why."""


class Failure(Section):
    """Why one rank ended."""

    kind: str
    message: str
    retryable: bool
    collective: bool = False
    """The error only says that another rank is gone."""
    traceback: str = Field(default="", repr=False)

    @property
    def exit_code(self) -> int:
        """The runner's exit code."""
        return EXIT_CODES.get(self.kind, 70)


class Outcome:
    """Writes one process's files into a local directory."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory = directory
        self.rank = rank
        self._notes: list[str] = []
        self._sequence = 0
        self._at = ("", 0, 0)
        self._written_s = 0.0
        directory.mkdir(parents=True, exist_ok=True)

    def note(self, message: str) -> None:
        """Something to tell people; also a sign of life."""
        print(message, flush=True)
        self._notes.append(message)
        self._write()

    def progress(self, phase: str, step: int, total: int) -> None:
        """``step`` of ``total`` done in this phase.

        Cheap: written at most every 0.2 s, and at each phase's start and end.
        """
        now_s = time.monotonic()
        turned = phase != self._at[0] or (step in (0, total) and step != self._at[1])
        if not turned and now_s - self._written_s < STATUS_INTERVAL_S:
            return
        self._at, self._written_s = (phase, step, total), now_s
        self._write()

    def _write(self) -> None:
        if self.rank != 0:
            return
        self._sequence += 1
        phase, step, total = self._at
        status = Status(sequence=self._sequence, phase=phase, step=step, total=total, notes=tuple(self._notes))
        _replace(self.directory / "status.json", status.model_dump_json())

    def failed(self, failure: Failure) -> None:
        """Leave this rank's last words."""
        _replace(self.directory / f"error.{self.rank}.json", failure.model_dump_json())

    def wait_for_reason(self, timeout_s: float) -> None:
        """Return when another rank has left a reason of its own, after ``timeout_s`` at the latest."""
        deadline_s = time.monotonic() + timeout_s
        while not has_reason(self.directory) and time.monotonic() < deadline_s:
            time.sleep(STATUS_INTERVAL_S)


def failure_of(error: BaseException, *, collective: bool = False) -> Failure:
    """Classify an exception: our own errors have a kind; memory, bad settings, absent services are recognised.

    An exhausted memory is a reason of its own, also where it is the group of ranks that ran into it.
    """
    trace = "".join(traceback.format_exception(error))
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
    text = str(error) if isinstance(error, CosmosRLError) else f"{type(error).__name__}: {error}"
    return Failure(kind=kind, message=text, retryable=kind in RETRYABLE_KINDS, collective=collective, traceback=trace)


def read_status(directory: Path) -> Status | None:
    """The newest status, or None before the first, or where it cannot be read."""
    return _read(directory / "status.json", Status)


def read_failures(directory: Path) -> list[Failure]:
    """Every rank's last words that can be read, the informative ones first: reasons before lost ranks, known kinds
    before crashes."""
    found = (_read(path, Failure) for path in sorted(directory.glob("error.*.json")))
    failures = [failure for failure in found if failure is not None]
    return sorted(failures, key=lambda failure: (failure.collective, failure.kind == "crash"))


def has_reason(directory: Path) -> bool:
    """Return whether a rank has told more than that it lost another one."""
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
