"""Run a wave of Requests without Prefect: start, watch and end their jobs, and classify failures."""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.config.parallelism import Parallelism
from cosmos_rl_core.errors import CosmosRLError, StageError, mistakes_in
from cosmos_rl_core.process_trees import KILLED
from cosmos_rl_core.storage import store
from flows import launchers
from flows.devices.devices import device_of, need_of
from flows.devices.fitting import misfits, most, turns, why_not_beside
from flows.devices.staying import Processes
from flows.devices.waiting import Waiting
from flows.devices.work_folders import is_full
from flows.launchers._base import NOT_BEGUN, Job, JobLauncher, JobState, RunningJob
from flows.launchers.endings import kind_of
from flows.launchers.overlap import EarlyScoring
from flows.ledger.attempts import named
from flows.ledger.ledger import Ledger
from flows.ledger.pages import Entry
from flows.running.display import Display
from flows.running.progress import NOT_REPORTED
from stages.artifacts.records import place_of as place_in_store
from stages.artifacts.request import Request
from stages.artifacts.slots import standing_manifest
from stages.contracts import Judge
from stages.execution.execution import Execution
from stages.execution.outcome import Status, read_failures, read_status
from stages.registry import STAGES

POLL_INTERVAL_S = 0.05
DIGEST_LENGTH = 64
NUMERICS, SCORERS = "numerics", "scorers"
"""Folders of a run: pinned numerics of its stages, and pinned scorers of reward services."""
LOG_TAIL = 30
"""Number of last log lines in the error of a failed stage."""
Holding = Callable[[Sequence[Request]], AbstractContextManager[None]]
"""Waits for what stages that run side by side need, and keeps it."""


@dataclass
class Waves:
    """The waves of one run, made one after the other."""

    run_url: str
    config: LaunchConfig
    display: Display
    allow_numerics_change: bool = False
    check: Callable[[], None] = lambda: None
    """Raises if the run must stop, for example because its lease is lost."""
    accept_scorer: bool = False
    """Whether another scorer of a reward service than the pinned one may go on."""
    ledger: Ledger | None = None
    """Where attempts are recorded; None for work that belongs to no run."""
    slots: int | None = None
    """Slots of the limit ``launch.gpu_limit``, if they are known."""
    overlapping: Callable[[Request], Sequence[Request]] = lambda _: ()
    """Returns the Requests for scores that begin while a stage makes its samples."""
    _jobs: JobLauncher = field(init=False)
    _out_of_memory: set[str] = field(default_factory=set)
    """Slots whose last attempt ran out of memory. The next attempt holds half as many samples in memory at once."""
    _fresh: set[str] = field(default_factory=set)
    """Slots whose last attempt ran out of memory beside what other stages had left in its processes."""
    _raised_at: dict[str, str] = field(default_factory=dict[str, str])
    """Of slots whose last attempt ended by a Python exception: its class and place."""

    def __post_init__(self) -> None:
        self._jobs = launchers.load(self.run_url, self.config)

    def make(
        self,
        name: str,
        requests: Sequence[Request],
        asked_s: float | None = None,
        holding: Holding = lambda _: nullcontext(),
    ) -> None:
        """Start the jobs of a wave, watch them until all have ended, and end them if anything fails here.

        Stages that do not fit the devices together take turns, each inside ``holding``. ``asked_s`` is when the wave
        was asked for, by the monotonic clock; by default now. Raises :class:`ConfigError` if a stage does not fit the
        devices even alone, and :class:`StageError` if one failed; of several failures, one that a retry cannot help.
        The others are printed.
        """
        made: list[_Running] = []
        asked_s = time.monotonic() if asked_s is None else asked_s
        page = None if self.ledger is None else self.ledger.page(name, asked_s)

        def entries() -> list[Entry]:
            return [one.entry(need_of(one.request.stage, self.config).count) for one in made]

        def turn(running: Sequence[_Running]) -> None:
            self.display.progress(name, [one.status for one in running if one.status.sequence])
            if page is not None:
                page.turn(entries)

        failed: list[StageError] = []
        try:
            for some in self._turns(name, requests):
                with holding(some):
                    failed += self._side_by_side(some, made, asked_s, turn)
                if any(not error.retryable for error in failed):
                    break
                asked_s = time.monotonic()
        finally:
            if page is not None:
                # A store that does not answer has an error of its own, which comes next.
                with suppress(CosmosRLError):
                    page.close(entries())
        if failed:
            # Failures that a retry cannot help come first.
            raised, *others = sorted(failed, key=lambda error: error.retryable)
            for error in others:
                self.display.note(str(error))
            raise raised

    def _turns(self, name: str, requests: Sequence[Request]) -> list[list[Request]]:
        """Return the Requests of a wave in turns that fit the devices.

        Raises :class:`ConfigError` for stages that do not fit even alone, which nothing before may have asked.
        """
        stages, devices = [request.stage for request in requests], self._jobs.devices
        if wrong := misfits(stages, self.config, devices, self.slots):
            raise mistakes_in(name, wrong)
        cut = turns(stages, self.config, most(self.config, devices, self.slots))
        found = [[requests[place] for place in places] for places in cut]
        if len(found) > 1:
            shown = ", then ".join(" and ".join(map(place_of, some)) for some in found)
            self.display.note(f"{name} does not fit the devices at once: {shown}")
        return found

    def _side_by_side(
        self,
        requests: Sequence[Request],
        made: list["_Running"],
        asked_s: float,
        turn: Callable[[Sequence["_Running"]], None],
    ) -> list[StageError]:
        """Run jobs until all have ended, add them to ``made`` and return why some failed; call ``turn`` meanwhile."""
        running: list[_Running] = []
        with self._jobs.reserve(requests, self.waiting()), ExitStack() as at_the_end:
            try:
                for one in self._start(requests, asked_s, at_the_end):
                    running.append(one)
                    made.append(one)
                early = [at_the_end.enter_context(one) for one in self._scoring_ahead(requests)]
                while any(one.state.phase != "ended" for one in running):
                    time.sleep(POLL_INTERVAL_S)
                    self.check()
                    for one in running:
                        one.look(self.config)
                    turn(running)
            finally:
                # End all jobs before anything else can fail.
                with ExitStack() as all_of_them:
                    for one in running:
                        all_of_them.callback(one.job.cancel)
                for one in running:
                    one.leave()
                    one.keep_log()
                    # Now, while its files are there. A store that does not answer raises below, too.
                    with suppress(CosmosRLError):
                        one.remember()
            ends = {one.request.slot: one.failure() for one in running}
            if not any(ends.values()):
                self._wait_for(early)
        failed = {slot: error for slot, error in ends.items() if error is not None}
        served_before = {one.request.slot for one in running if one.job.served_before}
        without_memory = {slot for slot in failed if failed[slot].kind == "out_of_memory"}
        self._fresh = self._fresh - ends.keys() | without_memory & served_before
        self._out_of_memory = self._out_of_memory - ends.keys() | without_memory - served_before
        if failed and failed.keys() <= self._fresh:
            again = [request for request in requests if request.slot in failed]
            names = ", ".join(map(place_of, again))
            self.display.note(f"{names}: out of memory in processes that served other stages; repeated in new ones")
            return self._side_by_side(again, made, time.monotonic(), turn)
        return [self._told(slot, error) for slot, error in failed.items()]

    def _told(self, slot: str, error: StageError) -> StageError:
        """Return the error of an attempt; one that no other attempt follows, if the attempt before ended likewise."""
        before = self._raised_at.get(slot)
        self._raised_at[slot] = error.raised_at
        return error.again() if error.raised_at and error.raised_at == before else error

    def _start(self, requests: Sequence[Request], asked_s: float, at_the_end: ExitStack) -> Iterator["_Running"]:
        jobs = [Job(request, self.execution_of(request), request.slot in self._fresh) for request in requests]
        # Before anything is submitted, because an allocation ends orders that its flow does not repeat.
        left = [(job, self._jobs.reattach(job)) for job in jobs]
        for job, started in sorted(left, key=lambda pair: pair[1] is None):
            begun_s = time.monotonic()
            if started is None:
                started = self._jobs.submit(job)
            else:
                self.display.note(f"{job.request.stage}: continues the job of an earlier flow")
            at_the_end.callback(started.discard)
            yield _Running(job.request, started, self.display.note, _asked_s=asked_s, _begun_s=begun_s)

    def _scoring_ahead(self, requests: Sequence[Request]) -> Iterator[EarlyScoring]:
        """Start what scores the rollouts of this wave while they run. Only on this machine.

        Rewards with torch get devices that are free now, and wait for none: the plan says which ones never fit.
        """
        stages, devices = [request.stage for request in requests], self._jobs.devices
        count = most(self.config, devices, self.slots)
        for rollout in requests if self.config.launcher == "local" else ():
            for reward in self.overlapping(rollout):
                share = None
                if STAGES[reward.stage].torch:
                    if why_not_beside([*stages, reward.stage], self.config, count):
                        continue
                    share = self._jobs.taken_beside(need_of(reward.stage, self.config))
                    if share is None and devices:
                        self.display.note(f"{place_of(reward)}: no device is free beside the rollout; it begins after")
                        continue
                    stages.append(reward.stage)
                job = Job(reward, self.execution_of(reward))
                yield EarlyScoring(rollout, job, self.config, self.display.note, share)

    def _wait_for(self, early: Sequence[EarlyScoring]) -> None:
        """Let scoring that began before its wave ended score the samples at hand."""
        began_s, early = time.monotonic(), [one for one in early if one.has_begun]
        while any(one.is_running() for one in early) and time.monotonic() - began_s < self.config.stall_timeout_s:
            time.sleep(POLL_INTERVAL_S)
            self.check()

    def execution_of(self, request: Request) -> Execution:
        """Return the execution of the next attempt of a Request."""
        launch, stage = self.config, request.stage
        alone = Parallelism(compile=launch.compile)
        return Execution(
            parallelism=launch.parallelism_of(stage) if STAGES[stage].distributed else alone,
            processes=launch.side_by_side(stage),
            device=device_of(stage, launch, self._jobs.devices) if STAGES[stage].torch else None,
            gpus=launch.stage_gpus.get(stage, ()),
            threads=launch.threads,
            deterministic=launch.deterministic,
            # A reward service never computes so, and its scorers have the versions of this stage's.
            tf32=launch.tf32 and stage != Judge.name,
            attention=launch.attention if stage != Judge.name else "auto",
            # Longer than the stall timeout: a rank that waits for a slow write must not fail before it counts as hung.
            rank_timeout_s=2 * launch.stall_timeout_s,
            numerics_record=store.join(self.run_url, NUMERICS, f"{stage}.json"),
            allow_numerics_change=self.allow_numerics_change,
            scorer_record=store.join(self.run_url, SCORERS),
            accept_scorer=self.accept_scorer,
            halve=request.slot in self._out_of_memory,
        )

    def waiting(self) -> Waiting:
        """Return a wait that prints its reasons."""
        return Waiting(self.display.note, self.check, self._jobs.give_back)

    def processes(self) -> Processes:
        """Return the processes that stay between waves."""
        return self._jobs.processes()

    def close(self) -> None:
        """Release what the launcher keeps between waves."""
        self._jobs.close()


def place_of(request: Request) -> str:
    """Return the name of a stage, as ``status`` has it: ``iteration-0003/update``; of prepared data with its digest."""
    last = request.slot.rpartition("/")[2]
    digest = f" {last[:12]}" if len(last) == DIGEST_LENGTH else ""
    return named(place_in_store(request.slot), request.stage) + digest


@dataclass
class _Running:
    request: Request
    job: RunningJob
    note: Callable[[str], None]
    state: JobState = NOT_BEGUN
    status: Status = NOT_REPORTED
    stopped: str | None = None
    """Why the job was ended, if it was ended here."""
    _asked_s: float = field(default_factory=time.monotonic)
    """When it was asked for."""
    _begun_s: float = field(default_factory=time.monotonic)
    """When it was submitted, or left the queue of a scheduler: from then on it costs."""
    _ended_s: float | None = None
    _log_url: str = ""
    """Where the log is, once it is written."""
    _left: bool = False
    """Whether its flow ended it, for a reason that is not its own."""
    _failure: tuple[StageError | None] | None = None
    _began_s: float = field(default_factory=time.monotonic)
    _progressed_s: float = field(default_factory=time.monotonic)

    def look(self, config: LaunchConfig) -> None:
        """Update state and status; end a job without progress or over its time limit."""
        now_s, before = time.monotonic(), self.state
        # Before the status is read, so that the last status of an ended process is not missed.
        self.state = self.job.poll()
        if self.state.phase == "waiting":
            self._begun_s = self._began_s = self._progressed_s = now_s
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
        """Take notice that the flow is about to leave an attempt, which has ended by now."""
        if self._ended_s is None:
            self._ended_s, self._left = time.monotonic(), True

    def remember(self) -> None:
        """Look for the failure of an attempt that has ended by itself, whose files will be gone."""
        if not self._left:
            self.failure()

    def entry(self, devices: int) -> Entry:
        """Return what the attempt cost until now."""
        until_s = time.monotonic() if self._ended_s is None else self._ended_s
        begun = self.state.phase != "waiting"
        return Entry(
            stage=self.request.stage,
            slot=place_in_store(self.request.slot),
            devices=devices,
            queued_s=round(max(0.0, (self._begun_s if begun else until_s) - self._asked_s), 3),
            seconds=round(max(0.0, until_s - self._begun_s), 3) if begun else 0.0,
            outcome=self._outcome(),
            spent=self.status.spent,
        )

    def _outcome(self) -> str:
        if self._ended_s is None:
            return "open"
        if self._left:
            return "stopped"
        failure = self.failure()
        return "made" if failure is None else failure.kind

    def keep_log(self) -> None:
        """Write the log beside the artifact. A failure is only noted, because the stage's own error matters more."""
        name = f"logs/{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(2)}.log"
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
        """Error files of ranks come before exit codes."""
        if standing_manifest(self.request) is not None:
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
