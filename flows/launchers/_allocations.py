"""Jobs inside allocations: the part that Slurm and Kubernetes share.

An allocation is kept from stage to stage, or each stage gets its own.
"""

import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.config.clusters import Resources
from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import UnavailableError
from cosmos_rl_core.process_trees import KILLED
from cosmos_rl_core.storage import store
from flows.launchers._allocation import LOOK_S, Allocation, Held, Scheduler
from flows.launchers._base import NOT_BEGUN, Job, JobState
from flows.launchers._processes import stage_environment
from flows.running.waiting import Waiting
from flows.running.work_folders import WorkFolder
from stages.artifacts.request import Request
from stages.contracts import STAGES
from stages.execution.mailbox import Mailbox, Order
from stages.execution.outcome import STATUS, has_reason

REASON_TIMEOUT_S = 40.0
"""Wait for error files of other nodes, in seconds, while the known ones only report a lost rank. Torchrun gives the
ranks of its node 30 s to end."""


class AllocatedJobs:
    """See :class:`flows.launchers._base.JobLauncher`."""

    def __init__(self, run_url: str, config: LaunchConfig, root: str, scheduler: Scheduler) -> None:
        self._config, self._settings = config, config.allocations
        self._run_url, self._root, self._scheduler = run_url, root, scheduler
        self._held: dict[str, Held] = {}

    def reserve(self, requests: Sequence[Request], waiting: Waiting) -> nullcontext[None]:
        """Return at once: the scheduler gives each allocation its own devices."""
        return nullcontext()

    def submit(self, job: Job) -> "OrderedJob":
        """Order the job, and ask the scheduler for an allocation if there is none."""
        allocation = self.allocation_of(job)
        held, order_id = self._hold(allocation), f"{job.name}-{secrets.token_hex(3)}"
        order = Order(
            id=order_id,
            name=job.name,
            request=job.request.model_dump_json(indent=1),
            execution=job.execution.model_dump_json(indent=1),
            command=tuple(self._scheduler.command(job, allocation, order_id)),
            environment=self._environment(job),
            nodes=allocation.agents if STAGES[job.request.stage].distributed else 1,
        )
        held.start(order)
        return self._ordered(held, order)

    def reattach(self, job: Job) -> "OrderedJob | None":
        """Return the job if its order has not ended and its allocation still exists, else None."""
        allocation = self.allocation_of(job)
        mailbox = allocation.mailbox
        orders = [order for order in mailbox.orders().orders if order.name == job.name]
        orders = [order for order in orders if mailbox.returncode(order) is None]
        if not orders or (found := self._scheduler.find(allocation)) is None:
            return None
        held = self._hold(allocation)
        held.id = found
        held.orders[orders[-1].id] = orders[-1]
        return self._ordered(held, orders[-1])

    def close(self) -> None:
        """End all allocations, including those that an earlier flow of this run left behind."""
        with suppress(UnavailableError):  # agents end by themselves when no flow writes orders
            for stage in STAGES if self._settings.hold else ():
                allocation = self._shared_allocation(stage, self._config.stage_gpus.get(stage, ()))
                if allocation.mailbox.orders().beat:
                    self._hold(allocation)
        with ExitStack() as all_of_them:
            for held in self._held.values():
                all_of_them.callback(held.release)
        self._held.clear()

    def allocation_of(self, job: Job) -> Allocation:
        """Return the allocation of a job: shared by all jobs with the same resources, or its own without ``hold``."""
        stage = STAGES[job.request.stage]
        if self._settings.hold:
            return self._shared_allocation(stage.name, job.execution.gpus)
        resources = self._resources(stage.name, job.execution.gpus)
        own = self._settings.stages.get(stage.name)
        given = set() if own is None else own.model_fields_set
        less = {} if stage.distributed else {"nodes": 1}
        less |= {} if stage.torch else {"gpus_per_node": 0}
        update = {name: number for name, number in less.items() if name not in given}
        return self._named(job.name, resources.model_copy(update=update))

    def _shared_allocation(self, stage: str, gpus: tuple[int, ...]) -> Allocation:
        resources = self._resources(stage, gpus)
        shared_by = {"run": self._run_url, "resources": resources.model_dump(), "gpus": list(gpus)}
        return self._named(f"cosmos-{digest(shared_by)[:20]}", resources)

    def _named(self, name: str, resources: Resources) -> Allocation:
        agents = resources.nodes if self._scheduler.agents_per_node else 1
        return Allocation(name, Mailbox(store.join(self._root, name)), agents, resources)

    def _resources(self, stage: str, gpus: tuple[int, ...]) -> Resources:
        resources = self._settings.resources_of(stage)
        return resources.model_copy(update={"gpus_per_node": len(gpus)}) if gpus else resources

    def _hold(self, allocation: Allocation) -> Held:
        if allocation.name not in self._held:
            self._held[allocation.name] = Held(allocation, self._scheduler, self._settings)
        return self._held[allocation.name]

    def _ordered(self, held: Held, order: Order) -> "OrderedJob":
        stage = order.name.rpartition("-")[0]
        errors = [f"error.{rank}.json" for rank in range(self._config.processes_of(stage))]
        copy = None if held.mailbox.is_shared else WorkFolder(stage)
        return OrderedJob(order, held, self._held, [STATUS, *errors], copy)

    def _environment(self, job: Job) -> dict[str, str]:
        # Ranks on one machine meet on the loopback interface only.
        alone = self._config.nodes_of(job.request.stage) == 1
        return ({"GLOO_SOCKET_IFNAME": "lo"} if alone else {}) | stage_environment(self._config)


@dataclass
class OrderedJob:
    """See :class:`flows.launchers._base.RunningJob`."""

    order: Order
    held: Held
    all_held: dict[str, Held]
    """All allocations of this flow, by name."""
    files: list[str]
    """Names of the files that the stage itself writes."""
    copy: WorkFolder | None
    """Local folder that receives these files, if the mailbox is a URL."""
    _state: JobState = NOT_BEGUN
    _looked_s: float = 0.0
    _failed_s: float | None = None
    """Monotonic time at which the first failed node was found."""
    mailbox: Mailbox = field(init=False)
    directory: Path = field(init=False)

    def __post_init__(self) -> None:
        self.mailbox = self.held.mailbox
        self.directory = Path(self.mailbox.path(self.order.id))
        if self.copy is not None:
            self.directory = self.copy.path

    def poll(self) -> JobState:
        """Return the state from the mailbox; ask the scheduler every ``query_s`` seconds."""
        now_s = time.monotonic()
        if self._state.phase != "ended" and now_s - self._looked_s > LOOK_S:
            self._looked_s = now_s
            # The next poll tries again. If the outage lasts for the stall timeout, the job counts as hung.
            with suppress(UnavailableError):
                for held in self.all_held.values():
                    held.renew()
                self._state = self._look(now_s)
        return self._state

    def _look(self, now_s: float) -> JobState:
        if (state := self._ended(now_s)) is not None:
            return self._why_killed(state) if state.killed else state
        allocation = self.held.state(self.held.settings.query_s)
        if allocation.phase == "ended":
            # The stage may have ended before its allocation did.
            lost = JobState("ended", KILLED, allocation.kind, allocation.reason)
            return self._ended(now_s, last=True) or lost
        self._fetch([STATUS])
        return allocation

    def _ended(self, now_s: float, *, last: bool = False) -> JobState | None:
        """Return how the order ended; None while it runs, or while another node may still report the reason."""
        code = self.mailbox.returncode(self.order)
        if code is None:
            return None
        self._fetch(self.files)
        some_run = None in self.mailbox.returncodes(self.order)
        if code != 0 and not last and some_run and not has_reason(self.directory):
            self._failed_s = now_s if self._failed_s is None else self._failed_s
            if now_s - self._failed_s < REASON_TIMEOUT_S:
                return None
        return JobState("ended", code)

    def _why_killed(self, state: JobState) -> JobState:
        """Return the scheduler's reason for a kill. It kills the processes first and ends the allocation later."""
        allocation = self.held.state()
        if allocation.phase == "ended":
            return replace(state, kind=allocation.kind, reason=allocation.reason)
        return allocation if allocation.phase == "ending" else state

    def _fetch(self, names: list[str]) -> None:
        for name in names if self.copy is not None else ():
            if (data := self.mailbox.read(self.order.id, name)) is not None:
                (self.directory / name).write_bytes(data)

    def log(self) -> bytes | None:
        """Return the logs of all nodes, one after the other; None before the first line."""
        logs = [self.mailbox.read(self.order.id, name) for name in self.order.by_node("log.{}.txt")]
        found = [log for log in logs if log is not None]
        return b"".join(found) if found else None

    def cancel(self) -> None:
        """Withdraw the order, and wait until its processes have ended."""
        self.held.withdraw(self.order, ended=self._state.phase == "ended")

    def discard(self) -> None:
        """Delete the job's files, and the mailbox if it belongs to this job alone."""
        self.held.orders.pop(self.order.id, None)
        if self.copy is not None:
            self.copy.remove()
        self.mailbox.discard(self.order, self.files)
        if not self.held.settings.hold:
            self.mailbox.remove(self.held.allocation.agents)
            del self.all_held[self.held.allocation.name]
