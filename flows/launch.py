"""Run a wave of Requests: reuse what stands, start the rest, watch it, and raise the stage's own words.

A wave is one synchronous Prefect task, called directly, so that a cancellation reaches it. Resuming is this: asking the
store what stands. Prefect's task cache is off.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.exceptions import Pause
from prefect.states import Cancelled, Completed, Failed
from prefect.tasks import Task, exponential_backoff

from cosmos_rl_core import store
from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ConfigError, CosmosRLError, StageError
from cosmos_rl_core.parallelism import Parallelism
from flows import gpus, launchers, pauses
from flows.display import Display
from flows.endings import kind_of
from flows.launchers._base import NOT_BEGUN, Job, JobLauncher, JobState
from stages.artifacts import standing, why_stale
from stages.contracts import STAGES, Request
from stages.manifest import Manifest
from stages.outcome import read_failures, read_status

POLL_INTERVAL_S = 0.05
KILLED = -9
LOG_TAIL = 30
"""Lines of a failed stage's log that are shown."""


@dataclass
class Launcher:
    """Makes Requests' artifacts stand."""

    run_url: str
    config: LaunchConfig
    display: Display
    allow_numerics_change: bool = False
    on_done: Callable[[Sequence[Request], Sequence[Manifest]], None] | None = None
    """Told of every wave that stands, made now or before."""
    check: Callable[[], None] = lambda: None
    """Raises where the work must end although nothing of it failed."""
    _jobs: JobLauncher = field(init=False)
    _out_of_memory: set[str] = field(default_factory=set)
    """Slots whose last try ran out of memory: the next one takes half as many samples at once."""

    def __post_init__(self) -> None:
        self._jobs = launchers.load(self.run_url, self.config)

    def launch(self, name: str, *requests: Request) -> list[Manifest]:
        """Run a wave side by side and return its manifests, in order.

        Raises :class:`StageError` when retries are used up, and Prefect's ``Pause`` if the flow run is suspended.
        """
        _refuse_overlap(requests)
        as_task = task(
            name=name.rpartition("/")[2],
            task_run_name=name,
            retries=self.config.max_attempts - 1,
            retry_delay_seconds=exponential_backoff(self.config.retry_delay_s),
            retry_jitter_factor=0.5,
            retry_condition_fn=_worth_retrying,
            cache_policy=NO_CACHE,
            persist_result=False,
        )
        outcome = as_task(lambda: self._attempt(name, requests))()
        result = outcome.result(raise_on_failure=False) if isinstance(outcome, State) else outcome
        if isinstance(result, StageError):
            result = result.in_full()
        if isinstance(result, BaseException):
            raise result.with_traceback(None)
        if self.on_done is not None:
            self.on_done(requests, result)
        return result

    def close(self) -> None:
        """Give back what the launcher holds between stages."""
        self._jobs.close()

    def _attempt(self, name: str, requests: Sequence[Request]) -> Any:
        """Return the manifests, or a state that holds why there are none.

        Prefect logs all frames of an exception that is raised, once a task and once a flow, and shows a task that a
        suspension ends as running forever.
        """
        try:
            return self._wave(name, requests)
        except CosmosRLError as error:
            return Failed(message=str(error), data=error)
        except Pause as suspended:
            return Cancelled(message="the flow run was suspended", data=suspended)

    def _wave(self, name: str, requests: Sequence[Request]) -> Any:
        self._go_on()
        missing = [request for request in requests if standing_manifest(request) is None]
        if missing:
            pauses.wait_while_paused(self.display.note, self._go_on)
            with gpus.taken(missing, self.config, self.display.note, self._go_on):
                self._make(name, missing)
        manifests = [standing_manifest(request) for request in requests]
        if any(manifest is None for manifest in manifests):
            raise StageError.of("crash", f"{name} ended without an artifact that stands")
        self.display.done(name, [m for m in manifests if m is not None], skipped=not missing)
        return manifests if missing else Completed(name="Skipped", data=manifests)

    def _go_on(self) -> None:
        """Raise if the work has to end although nothing of it failed."""
        self.check()
        pauses.stop_if_suspended()

    def _make(self, name: str, requests: Sequence[Request]) -> None:
        """Start, watch and end the jobs; whatever happens here, none of them is left."""
        running: list[_Running] = []
        with self._jobs.reserve(requests, self.display.note, self.check), ExitStack() as at_the_end:
            try:
                self._start([Job(request, self._flags(request)) for request in requests], running, at_the_end)
                while any(one.state.phase != "ended" for one in running):
                    time.sleep(POLL_INTERVAL_S)
                    self._go_on()
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

    def _flags(self, request: Request) -> tuple[str, ...]:
        """The runner's, after the request's path."""
        flags = ["--threads", str(self.config.threads)]
        flags += ["--numerics-record", store.join(self.run_url, "numerics", f"{request.stage}.json")]
        # Longer than what counts as hung, so that the supervisor decides and not a rank that waits for a large write.
        flags += ["--rank-timeout-s", str(2 * self.config.stall_timeout_s)]
        alone = Parallelism(compile=self.config.compile)
        distributed = STAGES[request.stage].distributed
        flags += (self.config.parallelism_of(request.stage) if distributed else alone).flags
        flags += ["--halve"] if request.slot in self._out_of_memory else []
        flags += [] if self.config.deterministic else ["--nondeterministic"]
        flags += ["--tf32"] if self.config.tf32 else []
        flags += ["--allow-numerics-change"] if self.allow_numerics_change else []
        return tuple(flags)


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


def _worth_retrying(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    error = state.result(raise_on_failure=False)
    return isinstance(error, CosmosRLError) and error.retryable


def _refuse_overlap(requests: Sequence[Request]) -> None:
    slots = [request.slot for request in requests]
    sets = [gpu for request in requests for gpu in request.gpus]
    if len(set(slots)) != len(slots) or len(set(sets)) != len(sets):
        raise ConfigError("requests of one wave must have slots and GPU sets of their own")
