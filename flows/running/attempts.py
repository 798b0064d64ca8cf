"""One attempt of a stage: its job, its progress, its cost, and why it failed."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import CosmosRLError, StageError
from cosmos_rl_core.process_trees import KILLED
from cosmos_rl_core.storage import store
from flows.devices.work_folders import is_full
from flows.launchers._base import NOT_BEGUN, JobState, RunningJob
from flows.launchers.endings import kind_of
from flows.ledger.attempts import named
from flows.ledger.pages import Entry
from flows.running.progress import NOT_REPORTED
from stages.artifacts.records import place_of as place_in_store
from stages.artifacts.request import Request
from stages.artifacts.slots import current_manifest
from stages.execution.outcome import Status, read_failures, read_status

DIGEST_LENGTH = 64
LOG_TAIL = 30
"""Number of last log lines in the error of a failed stage."""


def place_of(request: Request) -> str:
    """Return a stage's name as ``status`` shows it: ``iteration-0003/update``; with a digest if it prepares data."""
    last = request.slot.rpartition("/")[2]
    digest = f" {last[:12]}" if len(last) == DIGEST_LENGTH else ""
    return named(place_in_store(request.slot), request.stage) + digest


@dataclass
class RunningStage:
    """An attempt of a stage, from its submission to its failure or its artifact."""

    request: Request
    job: RunningJob
    note: Callable[[str], None]
    state: JobState = NOT_BEGUN
    status: Status = NOT_REPORTED
    stopped: str | None = None
    """Why the job was ended, if it was ended here."""
    asked_s: float = field(default_factory=time.monotonic)
    """When the attempt was asked for, by the monotonic clock."""
    begun_s: float = field(default_factory=time.monotonic)
    """When the job was submitted, or left the queue of a scheduler: from then on it costs device time."""
    _ended_s: float | None = None
    _log_url: str = ""
    """Where the log is, once it is written."""
    _left: bool = False
    """Whether the flow ended the attempt, for a reason outside of it."""
    _failure: tuple[StageError | None] | None = None
    _began_s: float = field(default_factory=time.monotonic)
    _progressed_s: float = field(default_factory=time.monotonic)

    def look(self, config: LaunchConfig) -> None:
        """Update state and status; end a job without progress or over its time limit."""
        before = self.state
        # Before the status is read, so that the last status of an ended process is not missed.
        self.state = self.job.poll()
        # After the poll, which may have started workers of an elastic stage and taken time.
        now_s = time.monotonic()
        if self.state.phase == "waiting":
            self.begun_s = self._began_s = self._progressed_s = now_s
            if self.state.reason != before.reason:
                self.note(f"{self.request.stage}: {self.state.reason}")
        status = read_status(self.job.directory) or self.status
        if status.sequence != self.status.sequence:
            self._progressed_s = now_s
            for message in status.notes[len(self.status.notes) :]:
                self.note(f"{self.request.stage}: {message}")
            self.status = status
        limit_s = config.time_limit_of(self.request.stage)
        if self.state.phase == "ended":
            self._ended_s = self._ended_s or now_s
            return
        if now_s - self._progressed_s > config.stall_timeout_s:
            self.stopped = "reported no progress"
        elif limit_s is not None and now_s - self._began_s > limit_s:
            self.stopped = f"exceeded its time limit of {limit_s:g} s"
        if self.stopped is not None:
            self.job.show_stacks()
            self.job.cancel()
            self.state, self._ended_s = JobState("ended", KILLED), time.monotonic()

    def leave(self) -> None:
        """Record that the flow leaves the attempt. If it has not ended by itself, the flow has ended it."""
        if self._ended_s is None:
            self._ended_s, self._left = time.monotonic(), True

    def remember(self) -> None:
        """Look for the failure of an attempt that has ended by itself, before its files are deleted."""
        if not self._left:
            self.failure()

    def entry(self, devices: int) -> Entry:
        """Return the entry of the ledger: the attempt's devices, seconds and outcome until now."""
        until_s = time.monotonic() if self._ended_s is None else self._ended_s
        begun = self.state.phase != "waiting"
        return Entry(
            stage=self.request.stage,
            slot=place_in_store(self.request.slot),
            devices=devices,
            queued_s=round(max(0.0, (self.begun_s if begun else until_s) - self.asked_s), 3),
            seconds=round(max(0.0, until_s - self.begun_s), 3) if begun else 0.0,
            outcome=self._outcome(),
            spent=self.status.spent,
            crew=self.status.crew,
        )

    def _outcome(self) -> str:
        if self._ended_s is None:
            return "open"
        if self._left:
            return "stopped"
        failure = self.failure()
        return "made" if failure is None else failure.kind

    def keep_log(self) -> None:
        """Write the log into the slot. A failure is only noted, because the stage's own error matters more."""
        # With microseconds, because names are sorted: two attempts may end in one second.
        name = f"logs/{datetime.now(UTC):%Y%m%dT%H%M%S-%f}-{secrets.token_hex(2)}.log"
        try:
            if (log := self.job.log()) is not None:
                store.write(url := store.join(self.request.slot, name), log)
                self._log_url = url
        except (CosmosRLError, OSError) as error:
            self.note(f"the log could not be written: {error}")

    def failure(self) -> StageError | None:
        """Return why there is no artifact; None if there is one. It is looked for once."""
        if self._failure is None:
            self._failure = (self._look_for_failure(),)
        return self._failure[0]

    def _look_for_failure(self) -> StageError | None:
        """Return the failure: from an error file of a rank, else from the exit code and the log."""
        if current_manifest(self.request) is not None:
            return None
        where = place_of(self.request)
        failures = read_failures(self.job.directory)
        if failures and not failures[0].collective:
            first, kind = failures[0], failures[0].kind
            if not first.frame:
                return StageError.of(kind, f"{where} failed ({kind}): {first.message}")
            place = f"on rank {first.rank}, at {first.frame}; log: {self._log_url or 'none'}"
            raised_at = f"{first.raised} {first.frame}"
            return StageError.of(kind, f"{where} failed ({kind}): {first.message}; {place}", raised_at=raised_at)
        if self.stopped is not None:
            log_place = f"its log is under {self.request.slot}/logs"
            return StageError.of("hung", f"{where} {self.stopped} and was ended; {log_place}")
        log = (self.job.log() or b"(no log)").decode(errors="replace").splitlines()
        kind = self.state.kind or kind_of(self.state, log)
        how = self.state.reason or f"exit code {self.state.exit_code}"
        if is_full(self.job.directory):
            how += f"; no space left in {self.job.directory}: free some, or set TMPDIR to a folder with room"
        return StageError.of(kind, f"{where} ended ({kind}, {how})", "\n".join(log[-LOG_TAIL:]))
