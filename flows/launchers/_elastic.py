"""A stage whose units several workers make, each a job of its own. To its wave it is one job."""

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import counted, first_line
from flows.devices.work_folders import WorkFolder
from flows.launchers._base import Job, JobState, RunningJob
from flows.launchers._handing import Handing
from flows.launchers.endings import exits_of_ranks, kind_of
from stages.artifacts.records import Pinned
from stages.artifacts.request import REQUEST
from stages.execution.handing import ENDED
from stages.execution.outcome import Failure, Outcome, Status, read_failures, read_status
from stages.execution.spending import Crew, together

LOST = {"killed", "crash", "hung"}
"""Kinds of failure after which other workers go on. Any other kind would hit the next worker too: the stage ends."""
MOST_LOSSES = 3
"""The stage fails when so many workers were lost with one unit, or in a row before they asked for a unit."""
JOIN_S = 1.0
"""Interval in seconds between searches for devices for another worker."""
STATUS_S = 0.2
LOG = "=== worker {} ===\n"


class Launcher(Protocol):
    """The part of a launcher that starts workers."""

    def join(self, job: Job) -> RunningJob | None:
        """Start a worker on devices that are free now; return None if there are not enough."""
        ...


@dataclass
class _Worker:
    number: int
    job: RunningJob
    began_s: float = field(default_factory=time.monotonic)
    status: Status | None = None
    progressed_s: float = field(default_factory=time.monotonic)
    log: bytes = b""
    ended_s: float | None = None
    waits: bool = False
    """Whether the cluster has no room for it yet."""

    @property
    def seconds(self) -> float:
        """Return how long it has worked."""
        return (self.ended_s or time.monotonic()) - self.began_s


class ElasticJob:
    """See :class:`flows.launchers._base.RunningJob`. ``most`` bounds the number of workers at once."""

    def __init__(
        self, job: Job, launcher: Launcher, launch: LaunchConfig, most: int, note: Callable[[str], None]
    ) -> None:
        self._job, self._launcher, self._launch, self._most, self._note = job, launcher, launch, most, note
        assert launch.elastic is not None
        self._least = min(launch.elastic.min, most)
        self._folder = WorkFolder(f"{job.request.stage}-workers")
        self.directory = self._folder.path
        (self.directory / REQUEST).write_text(job.request.model_dump_json(indent=1), encoding="utf-8")
        self._outcome = Outcome(self.directory, 0)
        self._handing = Handing(self.directory, _pinned(job))
        self._workers: dict[int, _Worker] = {}
        self._ended: list[_Worker] = []
        self._state, self._short = JobState("running"), False
        self._early_losses = self._lost = self._gave_back = self._largest = self._sequence = self._told = 0
        self._looked_s = self._written_s = 0.0
        self.served_before = False

    def poll(self) -> JobState:
        """Look at all workers, replace lost ones, and return the state."""
        if self._state.phase != "ended":
            for worker in list(self._workers.values()):
                if self._state.phase != "ended":
                    self._look(worker)
            if self._state.phase != "ended":
                self._join()
            self._write()
        return self._state

    def log(self) -> bytes | None:
        """Return the logs of all workers, one after the other."""
        found = [(one.number, one.log) for one in self._ended]
        found += [(number, one.job.log() or b"") for number, one in self._workers.items()]
        return b"".join(LOG.format(number).encode() + log for number, log in sorted(found))

    def show_stacks(self) -> None:
        """Let the processes of all workers write their stacks to their logs."""
        for worker in self._workers.values():
            worker.job.show_stacks()

    def cancel(self) -> None:
        """End all workers."""
        for worker in list(self._workers.values()):
            worker.job.cancel()
            self._leave(worker)
        self._handing.close()

    def discard(self) -> None:
        """Delete the files."""
        self._folder.remove()

    def _join(self) -> None:
        """Start workers while there is work for more, on devices that are free."""
        now_s = time.monotonic()
        if now_s - self._looked_s < JOIN_S and self._workers and not self._short:
            return
        self._looked_s = now_s
        while True:
            with self._handing.guard:
                wait, known = self._handing.units.wait, self._handing.units.count is not None
                # In place of a worker with other numerics, the next one would have them too.
                most = self._most - len(self._handing.unlike)
            if most <= 0:
                self._fail(Failure(kind="config", message=self._why_none(), retryable=False))
            if len(self._workers) >= most:
                break
            # The first worker alone decides how batches are halved.
            if not wait or (self._workers and self._job.execution.halve and not known):
                break
            number = len(self._ended) + len(self._workers)
            execution = self._job.execution.model_copy(
                update={
                    "units": str(self.directory),
                    "worker": number,
                    "halve": self._job.execution.halve and not known,
                }
            )
            job = self._launcher.join(replace(self._job, execution=execution))
            if job is None:
                break
            self._workers[number] = _Worker(number, job)
            self.served_before = self.served_before or job.served_before
        here = sum(not worker.waits for worker in self._workers.values())
        self._largest = max(self._largest, here)
        short = here < self._least and self._handing.units.wait
        if short and not self._short:
            self._say(f"waits for devices: it has {counted(here, 'worker')}, and needs {self._least} or more")
        self._short = short

    def _why_none(self) -> str:
        """Return why no worker may make units."""
        return (
            f"no worker has the numerics with which this run began {self._job.request.stage}: "
            f"{'; '.join(self._handing.unlike)}. Continue under the old numerics, or accept the change with "
            "--allow-numerics-change"
        )

    def _look(self, worker: _Worker) -> None:
        """Poll a worker, and handle its progress or its end."""
        now_s, state = time.monotonic(), worker.job.poll()
        if state.phase == "waiting":
            worker.began_s = worker.progressed_s = now_s
        worker.waits = state.phase == "waiting"
        status = read_status(worker.job.directory)
        if status is not None and (worker.status is None or status.sequence != worker.status.sequence):
            for message in status.notes[len(worker.status.notes) if worker.status else 0 :]:
                self._say(f"worker {worker.number}: {message}")
            worker.status, worker.progressed_s = status, now_s
        with self._handing.guard:
            mistake, unlike = self._handing.mistake, self._handing.unlike[self._told :]
            waits = worker.number in self._handing.waiting and not self._handing.units.of(worker.number)
        if waits:
            # It reports no progress, and has the whole timeout for the unit that it gets.
            worker.progressed_s = now_s
        self._told += len(unlike)
        for message in unlike:
            self._say(f"makes no units, because its numerics differ: {message}")
        if mistake:
            self._fail(Failure(kind="crash", message=mistake, retryable=False))
        elif state.phase == "ended":
            self._end(worker, state)
        elif now_s - worker.progressed_s > self._launch.stall_timeout_s:
            worker.job.show_stacks()
            worker.job.cancel()
            self._lose(worker, Failure(kind="hung", message="it reported no progress and was ended", retryable=True))

    def _end(self, worker: _Worker, state: JobState) -> None:
        """Handle the end of a worker, by itself or because somebody ended it."""
        with self._handing.guard:
            left, gave_back = (worker.number in some for some in (self._handing.left, self._handing.gave_back))
        failures = [one for one in read_failures(worker.job.directory) if not one.collective]
        log = (worker.job.log() or b"").decode(errors="replace").splitlines()
        # Where a rank fails, torchrun asks the others to end.
        if gave_back and not failures and exits_of_ranks(log) <= {ENDED, -signal.SIGTERM}:
            self._leave(worker)
            with self._handing.guard:
                units = self._handing.units.give_back(worker.number, lost=False)
            self._gave_back += 1
            self._say(f"worker {worker.number} was asked to end, and gave back {_named(units)}")
        elif state.exit_code == 0:
            self._leave(worker)
            # It made the artifact, or found one that is current.
            if not left:
                self._state = state
        else:
            kind = failures[0].kind if failures else state.kind or kind_of(state, log)
            failure = failures[0] if failures else Failure(kind=kind, message=_how(state), retryable=True)
            if kind in LOST:
                self._lose(worker, failure, node_lost=state.node_lost)
            else:
                self._leave(worker)
                self._fail(failure)

    def _lose(self, worker: _Worker, failure: Failure, *, node_lost: bool = False) -> None:
        """Hand the units of a lost worker to others; fail if too many workers were lost with one unit.

        The loss of a node is not counted against the units.
        """
        self._leave(worker)
        with self._handing.guard:
            asked = worker.number in self._handing.asked
            units = self._handing.units.give_back(worker.number, lost=not node_lost)
            losses = {unit: self._handing.units.losses[unit] for unit in units}
        self._lost += 1
        self._early_losses = 0 if asked or node_lost else self._early_losses + 1
        why = first_line(failure.message)
        self._say(f"worker {worker.number} is lost ({failure.kind}: {why}); others make {_named(units)}")
        worst = max(losses, key=lambda unit: losses[unit], default=None)
        if worst is not None and losses[worst] >= MOST_LOSSES:
            many = f"unit {worst} ended {losses[worst]} workers, the last one so: {failure.message}"
            frame = failure.frame or f"unit {worst}"
            self._fail(failure.model_copy(update={"message": many, "kind": "crash", "frame": frame}))
        elif self._early_losses >= MOST_LOSSES:
            self._fail(failure)

    def _fail(self, failure: Failure) -> None:
        """End the stage with the failure of a worker."""
        self._outcome.failed(failure)
        self._state = JobState("ended", failure.exit_code)

    def _leave(self, worker: _Worker) -> None:
        """Keep the log of a worker that has ended, and delete its files."""
        worker.ended_s = time.monotonic()
        with suppress(OSError):
            worker.log = worker.job.log() or b""
        worker.job.discard()
        self._ended.append(self._workers.pop(worker.number))

    def _say(self, message: str) -> None:
        self._note(f"{self._job.request.stage}: {message}")

    def _write(self) -> None:
        """Write the progress of the stage: the sum over all workers."""
        now_s = time.monotonic()
        if now_s - self._written_s < STATUS_S and self._state.phase != "ended":
            return
        self._written_s = now_s
        # The stage always reports progress: workers that hang are ended here, one by one.
        self._sequence += 1
        everyone = [*self._ended, *self._workers.values()]
        with self._handing.guard:
            units = self._handing.units
            made, total = len(units.made), units.count or 0
        statuses = [one.status for one in everyone if one.status is not None]
        at = [one.status.phase for one in self._workers.values() if one.status is not None]
        crew = Crew(
            workers=sum(not one.waits for one in self._workers.values()),
            largest=self._largest,
            units=made,
            of=total,
            lost=self._lost,
            gave_back=self._gave_back,
            worker_s=round(sum(one.seconds for one in everyone), 3),
        )
        phase = "waits for devices" if self._short else min(at, key=at.count, default="starting")
        spent = together([one.spent for one in statuses])
        status = Status(sequence=self._sequence, phase=phase, step=made, total=total, spent=spent, crew=crew)
        self._outcome.show(status)


def _pinned(job: Job) -> dict[str, Any] | None:
    """Return the numerics with which the run began the stage; None if it has not begun it, or may change them."""
    record = job.execution.numerics_record
    if record is None or job.execution.allow_numerics_change:
        return None
    found = Pinned.read(record, job.request.stage)
    return None if found is None else found.numerics


def _named(units: list[int]) -> str:
    return f"unit{'s' * (len(units) > 1)} {', '.join(map(str, units))}" if units else "no unit"


def _how(state: JobState) -> str:
    return state.reason or f"exit code {state.exit_code}"
