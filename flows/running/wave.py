"""Run a wave of Requests without Prefect: start, watch and end their jobs, and classify failures."""

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import CosmosRLError, StageError
from cosmos_rl_core.parallel.parallelism import Parallelism
from cosmos_rl_core.process_trees import KILLED
from cosmos_rl_core.storage import store
from flows import launchers
from flows.launchers._base import NOT_BEGUN, Job, JobLauncher, JobState, RunningJob
from flows.running.display import Display
from flows.running.endings import kind_of
from flows.running.waiting import Waiting
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import standing, why_stale
from stages.contracts import STAGES
from stages.execution.execution import Execution
from stages.execution.outcome import read_failures, read_status

POLL_INTERVAL_S = 0.05
LOG_TAIL = 30
"""Number of last log lines in the error of a failed stage."""


@dataclass
class Waves:
    """The waves of one run, made one after the other."""

    run_url: str
    config: LaunchConfig
    display: Display
    allow_numerics_change: bool = False
    check: Callable[[], None] = lambda: None
    """Raises if the run must stop, for example because its lease is lost."""
    _jobs: JobLauncher = field(init=False)
    _out_of_memory: set[str] = field(default_factory=set)
    """Slots whose last attempt ran out of memory. The next attempt holds half as many samples in memory at once."""

    def __post_init__(self) -> None:
        self._jobs = launchers.load(self.run_url, self.config)

    def make(self, name: str, requests: Sequence[Request]) -> None:
        """Start the jobs of a wave, watch them until all have ended, and end them if anything fails here.

        Raises :class:`StageError` if a stage failed; of several failures, one that a retry cannot help.
        """
        running: list[_Running] = []
        with self._jobs.reserve(requests, self.waiting()), ExitStack() as at_the_end:
            try:
                self._start(requests, running, at_the_end)
                while any(one.state.phase != "ended" for one in running):
                    time.sleep(POLL_INTERVAL_S)
                    self.check()
                    for one in running:
                        one.look(self.config)
                    statuses = [one.status for one in running if one.status is not None]
                    self.display.progress(name, statuses)
            finally:
                # End all jobs before anything else can fail.
                with ExitStack() as all_of_them:
                    for one in running:
                        all_of_them.callback(one.end)
                for one in running:
                    one.keep_log()
            ends = {one.request.slot: one.failure() for one in running}
        failed = {slot: error for slot, error in ends.items() if error is not None}
        self._out_of_memory -= ends.keys()
        self._out_of_memory |= {slot for slot in failed if failed[slot].kind == "out_of_memory"}
        if failed:
            self.display.note(str(next(iter(failed.values()))))
            # Failures that a retry cannot help come first.
            raise min(failed.values(), key=lambda error: error.retryable)

    def _start(self, requests: Sequence[Request], running: list["_Running"], at_the_end: ExitStack) -> None:
        def watch(request: Request, job: RunningJob) -> None:
            at_the_end.callback(job.discard)
            running.append(_Running(request, job, self.display.note))

        jobs = [Job(request, self.execution_of(request)) for request in requests]
        # Before anything is submitted, because an allocation ends orders that its flow does not repeat.
        left = [self._jobs.reattach(job) for job in jobs]
        for job, found in zip(jobs, left, strict=True):
            if found is not None:
                watch(job.request, found)
                stage = job.request.stage
                self.display.note(f"{stage}: continues the job that an earlier flow submitted")
        for job, found in zip(jobs, left, strict=True):
            if found is None:
                watch(job.request, self._jobs.submit(job))

    def execution_of(self, request: Request) -> Execution:
        """Return the execution of the next attempt of a Request."""
        launch, stage = self.config, request.stage
        alone = Parallelism(compile=launch.compile)
        return Execution(
            parallelism=launch.parallelism_of(stage) if STAGES[stage].distributed else alone,
            gpus=launch.stage_gpus.get(stage, ()),
            threads=launch.threads,
            deterministic=launch.deterministic,
            tf32=launch.tf32,
            # Longer than the stall timeout: a rank that waits for a slow write must not fail before it counts as hung.
            rank_timeout_s=2 * launch.stall_timeout_s,
            numerics_record=store.join(self.run_url, "numerics", f"{stage}.json"),
            allow_numerics_change=self.allow_numerics_change,
            halve=request.slot in self._out_of_memory,
        )

    def waiting(self) -> Waiting:
        """Return a wait that prints its reasons."""
        return Waiting(self.display.note, self.check)

    def close(self) -> None:
        """Release what the launcher keeps between waves."""
        self._jobs.close()


def standing_manifest(request: Request) -> Manifest | None:
    """Return the committed artifact that stands for this Request, or None."""
    _, manifest = standing(request.slot)
    if manifest is None or why_stale(manifest, request) is not None:
        return None
    return manifest


@dataclass
class _Running:
    request: Request
    job: RunningJob
    note: Callable[[str], None]
    state: JobState = NOT_BEGUN
    status: Any = None
    stopped: str | None = None
    """Why the job was ended, if it was ended here."""
    _notes_seen: int = 0
    _began_s: float = field(default_factory=time.monotonic)
    _progressed_s: float = field(default_factory=time.monotonic)

    def look(self, config: LaunchConfig) -> None:
        """Update state and status; end a job without progress or over its time limit."""
        now_s = time.monotonic()
        before = self.state
        # Before the status is read, so that the last status of an ended process is not missed.
        self.state = self.job.poll()
        if self.state.phase == "waiting":
            self._began_s = self._progressed_s = now_s
            if self.state.reason != before.reason:
                self.note(f"{self.request.stage}: {self.state.reason}")
        status = read_status(self.job.directory)
        if status is not None and (self.status is None or status.sequence != self.status.sequence):
            self._progressed_s = now_s
            for message in status.notes[self._notes_seen :]:
                self.note(f"{self.request.stage}: {message}")
            self._notes_seen = len(status.notes)
            self.status = status
        if self.state.phase == "ended":
            return
        limit_s = config.time_limit_of(self.request.stage)
        if now_s - self._progressed_s > config.stall_timeout_s:
            self._stop("reported no progress")
        elif limit_s is not None and now_s - self._began_s > limit_s:
            self._stop(f"exceeded its time limit of {limit_s:g} s")

    def _stop(self, why: str) -> None:
        self.stopped = why
        self.end()
        self.state = JobState("ended", KILLED)

    def end(self) -> None:
        """End the job and all its processes."""
        self.job.cancel()

    def keep_log(self) -> None:
        """Write the log beside the artifact. A failure is only noted, because the stage's own error matters more."""
        name = f"logs/{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(2)}.log"
        try:
            if (log := self.job.log()) is not None:
                store.write(store.join(self.request.slot, name), log)
        except (CosmosRLError, OSError) as error:
            self.note(f"the log could not be written: {error}")

    def failure(self) -> StageError | None:
        """Return why there is no artifact; None if there is one. Error files of ranks come before exit codes."""
        if standing_manifest(self.request) is not None:
            return None
        name = self.request.slot.rsplit("/", 2)
        where = "/".join(name[-2:])
        failures = read_failures(self.job.directory)
        if failures and not failures[0].collective:
            kind, message = failures[0].kind, failures[0].message
            return StageError.of(kind, f"{where} failed ({kind}): {message}")
        if self.stopped is not None:
            logs = f"{self.request.slot}/logs"
            return StageError.of("hung", f"{where} {self.stopped} and was ended; its log is under {logs}")
        log = (self.job.log() or b"(no log)").decode(errors="replace").splitlines()
        code = self.state.exit_code
        kind = self.state.kind or kind_of(self.state, log)
        how = self.state.reason or f"exit code {code}"
        return StageError.of(kind, f"{where} ended ({kind}, {how})", "\n".join(log[-LOG_TAIL:]))
