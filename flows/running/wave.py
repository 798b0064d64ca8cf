"""Run a wave of Requests without Prefect: start their jobs, watch them, end them, and say why one failed."""

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ConfigError, CosmosRLError, StageError
from cosmos_rl_core.parallel.parallelism import Parallelism
from cosmos_rl_core.storage import store
from flows import launchers
from flows.launchers._base import NOT_BEGUN, Job, JobLauncher, JobState
from flows.running.display import Display
from flows.running.endings import kind_of
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import standing, why_stale
from stages.contracts import STAGES
from stages.execution.execution import Execution
from stages.execution.outcome import read_failures, read_status

POLL_INTERVAL_S = 0.05
KILLED = -9
LOG_TAIL = 30
"""Lines of a failed stage's log that are shown."""


@dataclass
class Waves:
    """Runs the waves of one run, one after the other."""

    run_url: str
    config: LaunchConfig
    display: Display
    allow_numerics_change: bool = False
    check: Callable[[], None] = lambda: None
    """Raises if the run must stop, for example because its lease is lost."""
    _jobs: JobLauncher = field(init=False)
    _out_of_memory: set[str] = field(default_factory=set)
    """Slots whose last attempt ran out of memory. The next one has half as many samples in memory at once."""

    def __post_init__(self) -> None:
        self._jobs = launchers.load(self.run_url, self.config)

    def make(self, name: str, requests: Sequence[Request]) -> None:
        """Start the jobs of a wave, watch them until all have ended, and end them if anything fails here.

        Raises :class:`StageError` if a stage failed; of several the one that another attempt would not mend.
        """
        running: list[_Running] = []
        with self._jobs.reserve(requests, self.display.note, self.check), ExitStack() as at_the_end:
            try:
                self._start([Job(request, self.execution_of(request)) for request in requests], running, at_the_end)
                while any(one.state.phase != "ended" for one in running):
                    time.sleep(POLL_INTERVAL_S)
                    self.check()
                    for one in running:
                        one.look(self.config)
                    self.display.progress(name, [one.status for one in running if one.status is not None])
            finally:
                # All are ended before anything else that could fail.
                with ExitStack() as all_of_them:
                    for one in running:
                        all_of_them.callback(one.end)
                for one in running:
                    one.keep_log()
            failed = {one.request.slot: error for one in running if (error := one.failure()) is not None}
        self._out_of_memory -= {request.slot for request in requests}
        self._out_of_memory |= {slot for slot, error in failed.items() if error.kind == "out_of_memory"}
        if failed:
            self.display.note(str(next(iter(failed.values()))))
            # What cannot be helped by another try comes first.
            raise min(failed.values(), key=lambda error: error.retryable)

    def _start(self, jobs: Sequence[Job], running: list["_Running"], at_the_end: ExitStack) -> None:
        def watch(job: Job, job_id: str) -> None:
            at_the_end.callback(self._jobs.discard, job_id)
            running.append(_Running(job.request, job_id, self._jobs, self.display.note))

        # Before anything is submitted: an allocation ends what the flow that has it does not know.
        left = {job.name: job_id for job in jobs if (job_id := self._jobs.reattach(job)) is not None}
        for job in jobs:
            if job.name in left:
                watch(job, left[job.name])
                self.display.note(f"{job.request.stage}: goes on as {left[job.name]}, which an earlier flow submitted")
        for job in jobs:
            if job.name not in left:
                watch(job, self._jobs.submit(job))

    def execution_of(self, request: Request) -> Execution:
        """Return how the next attempt of a Request is run."""
        launch, stage = self.config, request.stage
        return Execution(
            parallelism=launch.parallelism_of(stage)
            if STAGES[stage].distributed
            else Parallelism(compile=launch.compile),
            gpus=launch.stage_gpus.get(stage, ()),
            threads=launch.threads,
            deterministic=launch.deterministic,
            tf32=launch.tf32,
            # Longer than what counts as hung, so that the supervisor decides and not a rank that waits for a write.
            rank_timeout_s=2 * launch.stall_timeout_s,
            numerics_record=store.join(self.run_url, "numerics", f"{stage}.json"),
            allow_numerics_change=self.allow_numerics_change,
            halve=request.slot in self._out_of_memory,
        )

    def close(self) -> None:
        """Give back what the launcher holds between waves."""
        self._jobs.close()


def standing_manifest(request: Request) -> Manifest | None:
    """The committed artifact that stands for this Request, or None."""
    _, manifest = standing(request.slot)
    if manifest is None or why_stale(manifest, request) is not None:
        return None
    return manifest


@dataclass
class _Running:
    request: Request
    job_id: str
    jobs: JobLauncher
    note: Callable[[str], None]
    state: JobState = NOT_BEGUN
    status: Any = None
    stopped: str | None = None
    """Why we ended it."""
    _notes_seen: int = 0
    _began_s: float = field(default_factory=time.monotonic)
    _alive_s: float = field(default_factory=time.monotonic)

    def look(self, config: LaunchConfig) -> None:
        """Notice the end, progress, or the lack of it."""
        now_s = time.monotonic()
        before = self.state
        # Before the status is read, so that the last words of a process that has ended are not missed.
        self.state = self.jobs.poll(self.job_id)
        if self.state.phase == "waiting":
            self._began_s = self._alive_s = now_s
            if self.state.reason != before.reason:
                self.note(f"{self.request.stage}: {self.state.reason}")
        status = read_status(self.jobs.outcome(self.job_id))
        if status is not None and (self.status is None or status.sequence != self.status.sequence):
            self._alive_s = now_s
            for message in status.notes[self._notes_seen :]:
                self.note(f"{self.request.stage}: {message}")
            self._notes_seen = len(status.notes)
            self.status = status
        if self.state.phase == "ended":
            return
        limit_s = config.time_limit_of(self.request.stage)
        if now_s - self._alive_s > config.stall_timeout_s:
            self._stop("gave no sign of life")
        elif limit_s is not None and now_s - self._began_s > limit_s:
            self._stop(f"took longer than its {limit_s:g} s")

    def _stop(self, why: str) -> None:
        self.stopped = why
        self.end()
        self.state = JobState("ended", KILLED)

    def end(self) -> None:
        """Leave nothing running."""
        self.jobs.cancel(self.job_id)

    def keep_log(self) -> None:
        """Put the log beside the artifact. Where that fails, the stage's own words matter more."""
        name = f"logs/{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(2)}.log"
        try:
            if (log := self.jobs.logs(self.job_id)) is not None:
                store.write(store.join(self.request.slot, name), log)
        except (CosmosRLError, OSError) as error:
            self.note(f"the log could not be kept: {error}")

    def failure(self) -> StageError | None:
        """Why there is no artifact: a manifest wins, then the ranks' own words, then how the process ended."""
        if standing_manifest(self.request) is not None:
            return None
        name = self.request.slot.rsplit("/", 2)
        where = "/".join(name[-2:])
        failures = read_failures(self.jobs.outcome(self.job_id))
        if failures and not failures[0].collective:
            return StageError.of(failures[0].kind, f"{where} failed ({failures[0].kind}): {failures[0].message}")
        if self.stopped is not None:
            return StageError.of(
                "hung", f"{where} {self.stopped} and was ended; its log is under {self.request.slot}/logs"
            )
        log = (self.jobs.logs(self.job_id) or b"(no log)").decode(errors="replace").splitlines()
        code = self.state.exit_code
        kind = self.state.kind or kind_of(self.state, log)
        how = self.state.reason or f"exit code {code}"
        return StageError.of(kind, f"{where} ended ({kind}, {how})", "\n".join(log[-LOG_TAIL:]))


def refuse_overlap(requests: Sequence[Request], launch: LaunchConfig) -> None:
    slots = [request.slot for request in requests]
    sets = [gpu for request in requests for gpu in launch.stage_gpus.get(request.stage, ())]
    if len(set(slots)) != len(slots) or len(set(sets)) != len(sets):
        raise ConfigError("requests of one wave must have slots and GPU sets of their own")
