"""Run a wave of Requests without Prefect: start, watch and end their jobs, and classify failures."""

import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.config.parallelism import Parallelism
from cosmos_rl_core.errors import ConfigError, CosmosRLError, StageError, mistakes_in
from cosmos_rl_core.storage import store
from flows import launchers
from flows.devices.devices import device_of, need_of, need_of_worker
from flows.devices.fitting import misfits, most, turns, why_not_together
from flows.devices.staying import Processes
from flows.devices.waiting import Waiting
from flows.launchers._base import Job, JobLauncher
from flows.launchers._elastic import ElasticJob
from flows.launchers.overlap import EarlyScoring
from flows.ledger.ledger import Ledger
from flows.ledger.pages import Entry
from flows.running.attempts import RunningStage, place_of
from flows.running.display import Display
from stages.artifacts.request import Request
from stages.contracts import Judge
from stages.execution.execution import Execution
from stages.registry import STAGES

POLL_INTERVAL_S, SHORTEST_REST_S = 0.05, 0.005

NUMERICS, SCORERS = "numerics", "scorers"
"""Folders of a run: pinned numerics of its stages, and pinned scorers of reward services."""
Holding = Callable[[Sequence[Request]], AbstractContextManager[None]]
"""Waits for the resources of stages that run side by side, and keeps them while its context is open."""


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
    """Whether to continue with another scorer of a reward service than the pinned one."""
    ledger: Ledger | None = None
    """Where attempts are recorded; None for work that belongs to no run."""
    gpu_slots: int | None = None
    """Concurrency slots of the limit ``launch.gpu_limit``, if they are known."""
    overlapping: Callable[[Request], Sequence[Request]] = lambda _: ()
    """Returns the Requests for scores that begin while a stage makes its samples."""
    begun: set[str] = field(default_factory=set[str])
    """Slots whose artifacts were not current when these waves came to them."""
    _jobs: JobLauncher = field(init=False)
    _out_of_memory: set[str] = field(default_factory=set)
    """Slots whose last attempt ran out of memory. The next attempt holds half as many samples in memory at once."""
    _fresh: set[str] = field(default_factory=set)
    """Slots whose last attempt ran out of memory in processes that had served other stages. The next gets new ones."""
    _raised_at: dict[str, str] = field(default_factory=dict[str, str])
    """Class and place of the Python exception that ended the last attempt, by slot."""

    def __post_init__(self) -> None:
        self._jobs = launchers.load(self.run_url, self.config)
        if self.config.elastic is not None and not store.decides_races(self.run_url):
            raise ConfigError(
                f"launch.elastic: two workers may finish one unit, and the store of {self.run_url} has no conditional "
                "writes, by which the first one counts; take another store, or leave elastic out"
            )

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
        devices even alone, and :class:`StageError` if one failed. If several failed, a failure that a
        retry cannot help is raised first; the other failures are printed.
        """
        made: list[RunningStage] = []
        asked_s = time.monotonic() if asked_s is None else asked_s
        page = None if self.ledger is None else self.ledger.page(name, asked_s)

        def entries() -> list[Entry]:
            return [one.entry(self._devices_of(one.request.stage)) for one in made]

        def turn(running: Sequence[RunningStage]) -> None:
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

    def _devices_of(self, stage: str) -> int:
        """Return the devices of a stage, or of one of its workers."""
        need = need_of_worker if self.config.elastic_of(stage) else need_of
        return need(stage, self.config).count

    def _turns(self, name: str, requests: Sequence[Request]) -> list[list[Request]]:
        """Return the Requests of a wave in turns that fit the devices.

        Raises :class:`ConfigError` for stages that do not fit even alone, because no earlier check may have asked.
        """
        stages, devices = [request.stage for request in requests], self._jobs.devices
        if wrong := misfits(stages, self.config, devices, self.gpu_slots):
            raise mistakes_in(name, wrong)
        cut = turns(stages, self.config, most(self.config, devices, self.gpu_slots))
        found = [[requests[place] for place in places] for places in cut]
        if len(found) > 1:
            shown = ", then ".join(" and ".join(map(place_of, some)) for some in found)
            self.display.note(f"{name} does not fit the devices at once: {shown}")
        return found

    def _side_by_side(
        self,
        requests: Sequence[Request],
        made: list[RunningStage],
        asked_s: float,
        turn: Callable[[Sequence[RunningStage]], None],
    ) -> list[StageError]:
        """Run jobs until all have ended, add them to ``made`` and return why some failed; call ``turn`` meanwhile."""
        running: list[RunningStage] = []
        with self._jobs.reserve(requests, self.waiting()), ExitStack() as at_the_end:
            try:
                for one in self._start(requests, asked_s, at_the_end):
                    running.append(one)
                    made.append(one)
                early = [at_the_end.enter_context(one) for one in self._scoring_ahead(requests)]
                while any(one.state.phase != "ended" for one in running):
                    self._rest()
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

    def _rest(self) -> None:
        """Wait until the next look at the jobs, less long if one may have ended meanwhile."""
        # A reply that nobody waits for stays in its pipe.
        time.sleep(SHORTEST_REST_S)
        select.select(self._jobs.replies(), [], [], POLL_INTERVAL_S)

    def _told(self, slot: str, error: StageError) -> StageError:
        """Return the error of an attempt. It becomes final if the attempt before raised the same exception there."""
        before = self._raised_at.get(slot)
        self._raised_at[slot] = error.raised_at
        return error.again() if error.raised_at and error.raised_at == before else error

    def _start(self, requests: Sequence[Request], asked_s: float, at_the_end: ExitStack) -> Iterator[RunningStage]:
        jobs = [Job(request, self.execution_of(request), request.slot in self._fresh) for request in requests]
        for job in jobs:
            begun_s = time.monotonic()
            if self.config.elastic_of(job.request.stage):
                started = ElasticJob(job, self._jobs, self.config, self._most_workers(jobs, job), self.display.note)
            else:
                started = self._jobs.submit(job)
            at_the_end.callback(started.discard)
            yield RunningStage(job.request, started, self.display.note, asked_s=asked_s, begun_s=begun_s)

    def _most_workers(self, jobs: Sequence[Job], job: Job) -> int:
        """Return how many workers a stage of a wave may have, next to the others of the wave."""
        assert self.config.elastic is not None
        stage, count = job.request.stage, most(self.config, self._jobs.devices, self.gpu_slots)
        each = need_of_worker(stage, self.config).count
        if count is None or not each:
            return self.config.elastic.max
        others = sum(need_of(other.request.stage, self.config).count for other in jobs if other is not job)
        return max(min(self.config.elastic.max, (count - others) // each), 1)

    def _scoring_ahead(self, requests: Sequence[Request]) -> Iterator[EarlyScoring]:
        """Start processes that score the rollouts of this wave while they run, only on this machine.

        Rewards with torch get devices that are free now, and wait for none: the plan says which rewards never fit.
        """
        stages, devices = [request.stage for request in requests], self._jobs.devices
        count = most(self.config, devices, self.gpu_slots)
        for rollout in requests if self.config.launcher == "local" else ():
            for reward in self.overlapping(rollout):
                share = None
                if STAGES[reward.stage].torch:
                    if why_not_together([*stages, reward.stage], self.config, count):
                        continue
                    share = self._jobs.taken_meanwhile(need_of(reward.stage, self.config))
                    if share is None and devices:
                        self.display.note(f"{place_of(reward)}: no device is free during the rollout; it begins after")
                        continue
                    stages.append(reward.stage)
                job = Job(reward, self.execution_of(reward))
                yield EarlyScoring(rollout, job, self.config, self.display.note, share)

    def _wait_for(self, early: Sequence[EarlyScoring]) -> None:
        """Wait until early scoring that has loaded its scorer has scored the samples, at most for the stall timeout."""
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
            # A judge computes as a reward service does, because scorers of one version give equal scores in both.
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
