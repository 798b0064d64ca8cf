"""Allocations: nodes that Slurm or Kubernetes gives, each with an agent that starts the stages ordered in its mailbox.

An allocation is kept from stage to stage, or each stage gets its own. Its name is a digest of what was requested. A
later flow finds it by this name, even if the flow that submitted it was killed before it could record the scheduler's
id. The agent is :mod:`stages.execution.agent`.
"""

import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.config.clusters import Holding, Resources
from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import CosmosRLError, UnavailableError
from cosmos_rl_core.process_trees import KILLED
from cosmos_rl_core.storage import store
from flows.devices.devices import Need
from flows.devices.fitting import with_gpus
from flows.devices.staying import Processes
from flows.devices.waiting import Waiting
from flows.devices.work_folders import WorkFolder
from flows.launchers._base import NOT_BEGUN, Job, JobState
from flows.launchers._processes import module, stage_environment
from stages.artifacts.request import Request
from stages.execution.mailbox import Mailbox, Order, Orders
from stages.execution.outcome import STATUS, has_reason
from stages.registry import STAGES

LOOK_S = 0.5
"""Interval in seconds at which the mailbox is read."""
CANCEL_TIMEOUT_S = 90.0
"""Wait for agents to end a stage, in seconds; then the allocation is ended."""
END_TIMEOUT_S = 300.0
"""Wait for a scheduler to end an allocation, in seconds."""
REASON_TIMEOUT_S = 40.0
"""Wait for error files of other nodes, in seconds, while the known ones only report a lost rank. Torchrun gives the
ranks of its node 30 s to end."""
BEATS = 5
"""Number of times that a flow renews its orders within ``idle_s``."""


class Scheduler(Protocol):
    """An interface to Slurm or Kubernetes. All methods raise :class:`UnavailableError` if it does not answer."""

    agents_per_node: bool
    """Whether every node has an agent; else the agent of the first node starts processes on the others."""

    def find(self, allocation: "Allocation") -> str | None:
        """Return the id of a waiting or running allocation of this name, None if there is none."""

    def start(self, allocation: "Allocation") -> str:
        """Submit the allocation and return its id at once. Raises :class:`ConfigError` if the scheduler refuses it."""
        ...

    def state(self, allocation: "Allocation") -> JobState:
        """Return the state of a submitted allocation."""
        ...

    def end(self, allocation: "Allocation") -> None:
        """End a submitted allocation if it has not ended; return when its processes are gone."""

    def command(self, job: Job, allocation: "Allocation", order: str) -> list[str]:
        """Return the command by which an agent starts a job."""
        ...


@dataclass
class Allocation:
    """Nodes to request from a scheduler, and the orders of this flow for them."""

    name: str
    mailbox: Mailbox
    agents: int
    """Number of agents."""
    resources: Resources
    scheduler: Scheduler
    settings: Holding
    id: str = ""
    """The scheduler's id; empty until the allocation is found or submitted."""
    orders: dict[str, Order] = field(default_factory=dict)
    _state: JobState = NOT_BEGUN
    _asked_s: float = 0.0
    _beat: int = 0
    _wrote_s: float = 0.0

    def start(self, order: Order) -> None:
        """Write an order, and submit the allocation if the scheduler has none of this name."""
        self.orders[order.id] = order
        try:
            # Orders come first, so that an allocation never runs without them.
            self._write()
            self.id = self.scheduler.find(self) or self.scheduler.start(self)
        except BaseException:
            del self.orders[order.id]
            raise
        self._state, self._asked_s = NOT_BEGUN, 0.0

    def state(self, at_most_every_s: float = 0.0) -> JobState:
        """Return the state, at most ``at_most_every_s`` seconds old."""
        now_s = time.monotonic()
        if now_s - self._asked_s > at_most_every_s:
            self._state, self._asked_s = self.scheduler.state(self), now_s
        return self._state

    def renew(self) -> None:
        """Write the orders again before the agents conclude that this flow has ended."""
        if time.monotonic() - self._wrote_s > self.settings.idle_s / BEATS:
            self._write()

    def withdraw(self, order: Order, *, ended: bool) -> None:
        """Withdraw an order and wait until the agents have ended it; without ``hold`` end the allocation too."""
        if self.orders.pop(order.id, None) is not None and self.settings.hold and not ended:
            self._write()
            self._wait_for_agents()
        if not self.settings.hold:
            self.scheduler.end(self)

    def _wait_for_agents(self) -> None:
        deadline_s = time.monotonic() + CANCEL_TIMEOUT_S
        while self.mailbox.carried_out(self.agents) < self._beat:
            # A waiting or ended allocation has no agents.
            if self.scheduler.state(self).phase in ("waiting", "ended"):
                return
            if time.monotonic() > deadline_s:
                self.scheduler.end(self)
                return
            time.sleep(LOOK_S)

    def release(self) -> None:
        """End the allocation and delete its mailbox."""
        try:
            # If the flow was interrupted while it submitted, the id is unknown.
            self.id = self.id or self.scheduler.find(self) or ""
            if self.id:
                self.scheduler.end(self)
            self.mailbox.remove(self.agents)
        except CosmosRLError as error:
            print(f"{self.name} could not be ended and ends when idle: {error}", file=sys.stderr)

    def _write(self) -> None:
        # Beats also grow over those of an earlier flow.
        self._beat = max(self._beat, self.mailbox.orders().beat) + 1
        self._wrote_s = time.monotonic()
        self.mailbox.write(Orders(beat=self._beat, orders=tuple(self.orders.values())))


class AllocatedJobs:
    """See :class:`flows.launchers._base.JobLauncher`."""

    devices: Sequence[str] = ()

    def __init__(self, run_url: str, config: LaunchConfig, root: str, scheduler: Scheduler) -> None:
        self._config, self._settings = config, config.allocations
        self._run_url, self._root, self._scheduler = run_url, root, scheduler
        self._held: dict[str, Allocation] = {}

    def reserve(self, requests: Sequence[Request], waiting: Waiting) -> nullcontext[None]:
        """Return at once: the scheduler gives each allocation its own devices."""
        return nullcontext()

    def taken_beside(self, need: Need) -> None:
        """Return None: here nothing runs at the same time as a wave."""

    def give_back(self) -> None:
        """Do nothing: other runs wait for none of these devices."""

    def processes(self) -> Processes:
        """Return none: no process here stays."""
        return Processes()

    def submit(self, job: Job) -> "OrderedJob":
        """Order the job, and ask the scheduler for an allocation if there is none."""
        allocation = self._hold(self.allocation_of(job))
        order_id = f"{job.name}-{secrets.token_hex(3)}"
        order = Order(
            id=order_id,
            name=job.name,
            request=job.request.model_dump_json(indent=1),
            execution=job.execution.model_dump_json(indent=1),
            command=tuple(self._scheduler.command(job, allocation, order_id)),
            environment=self._environment(job),
            nodes=allocation.agents if STAGES[job.request.stage].distributed else 1,
        )
        allocation.start(order)
        return OrderedJob(job, order, allocation.name, self._held)

    def reattach(self, job: Job) -> "OrderedJob | None":
        """Return the job if its order has not ended and its allocation still exists, else None."""
        allocation = self.allocation_of(job)
        mailbox = allocation.mailbox
        orders = [order for order in mailbox.orders().orders if order.name == job.name]
        orders = [order for order in orders if mailbox.returncode(order) is None]
        if not orders or (found := self._scheduler.find(allocation)) is None:
            return None
        allocation = self._hold(allocation)
        allocation.id = found
        allocation.orders[orders[-1].id] = orders[-1]
        return OrderedJob(job, orders[-1], allocation.name, self._held)

    def close(self) -> None:
        """End all allocations, including those that an earlier flow of this run left behind."""
        with suppress(UnavailableError):  # agents end by themselves when no flow writes orders
            for stage in STAGES if self._settings.hold else ():
                allocation = self._shared_allocation(stage, self._config.stage_gpus.get(stage, ()))
                if allocation.mailbox.orders().beat:
                    self._hold(allocation)
        with ExitStack() as all_of_them:
            for allocation in self._held.values():
                all_of_them.callback(allocation.release)
        self._held.clear()

    def allocation_of(self, job: Job) -> Allocation:
        """Return the allocation of a job: shared by all jobs with the same resources, or its own without ``hold``."""
        stage = STAGES[job.request.stage]
        if self._settings.hold:
            return self._shared_allocation(stage.name, job.execution.gpus)
        resources = with_gpus(self._settings.resources_of(stage.name), len(job.execution.gpus))
        own = self._settings.stages.get(stage.name)
        given = set() if own is None else own.model_fields_set
        less = {} if stage.distributed else {"nodes": 1}
        less |= {} if stage.torch else {"gpus_per_node": 0}
        update = {name: number for name, number in less.items() if name not in given}
        return self._named(job.name, resources.model_copy(update=update))

    def _shared_allocation(self, stage: str, gpus: tuple[int, ...]) -> Allocation:
        resources = with_gpus(self._settings.resources_of(stage), len(gpus))
        shared_by = {"run": self._run_url, "resources": resources.model_dump(), "gpus": list(gpus)}
        return self._named(f"cosmos-{digest(shared_by)[:20]}", resources)

    def _named(self, name: str, resources: Resources) -> Allocation:
        mailbox = Mailbox(store.join(self._root, name))
        agents = resources.nodes if self._scheduler.agents_per_node else 1
        return Allocation(name, mailbox, agents, resources, self._scheduler, self._settings)

    def _hold(self, allocation: Allocation) -> Allocation:
        return self._held.setdefault(allocation.name, allocation)

    def _environment(self, job: Job) -> dict[str, str]:
        # Ranks on one machine meet on the loopback interface only.
        alone = self._config.nodes_of(job.request.stage) == 1
        return ({"GLOO_SOCKET_IFNAME": "lo"} if alone else {}) | stage_environment(self._config)


class OrderedJob:
    """See :class:`flows.launchers._base.RunningJob`."""

    served_before = False

    def __init__(self, job: Job, order: Order, name: str, held: dict[str, Allocation]) -> None:
        """Watch an order of a job in the allocation ``name``. ``held`` are all allocations of this flow."""
        self._order, self._held, self._allocation = order, held, held[name]
        self._mailbox = self._allocation.mailbox
        ranks = range(job.execution.parallelism.world_size)
        # The files that the stage itself writes. From a mailbox at a URL they are copied to a local folder.
        self._files = [STATUS, *(f"error.{rank}.json" for rank in ranks)]
        self._copy = None if self._mailbox.is_shared else WorkFolder(job.request.stage)
        shared = Path(self._mailbox.path(order.id))
        self.directory = shared if self._copy is None else self._copy.path
        self._state, self._looked_s = NOT_BEGUN, 0.0
        self._failed_s: float | None = None
        """Monotonic time at which the first failed node was found."""

    def poll(self) -> JobState:
        """Return the state from the mailbox; ask the scheduler every ``query_s`` seconds."""
        now_s = time.monotonic()
        if self._state.phase != "ended" and now_s - self._looked_s > LOOK_S:
            self._looked_s = now_s
            # The next poll tries again. If the outage lasts for the stall timeout, the job counts as hung.
            with suppress(UnavailableError):
                for allocation in self._held.values():
                    allocation.renew()
                self._state = self._look(now_s)
        return self._state

    def _look(self, now_s: float) -> JobState:
        if (state := self._ended(now_s)) is not None:
            return self._why_killed(state) if state.killed else state
        allocation = self._allocation.state(self._allocation.settings.query_s)
        if allocation.phase == "ended":
            # The stage may have ended before its allocation did.
            lost = JobState("ended", KILLED, allocation.kind, allocation.reason)
            return self._ended(now_s, last=True) or lost
        self._fetch([STATUS])
        return allocation

    def _ended(self, now_s: float, *, last: bool = False) -> JobState | None:
        """Return how the order ended; None while it runs, or while another node may still report the reason."""
        code = self._mailbox.returncode(self._order)
        if code is None:
            return None
        self._fetch(self._files)
        some_run = None in self._mailbox.returncodes(self._order)
        if code != 0 and not last and some_run and not has_reason(self.directory):
            self._failed_s = now_s if self._failed_s is None else self._failed_s
            if now_s - self._failed_s < REASON_TIMEOUT_S:
                return None
        return JobState("ended", code)

    def _why_killed(self, state: JobState) -> JobState:
        """Return the scheduler's reason for a kill. It kills the processes first and ends the allocation later."""
        allocation = self._allocation.state()
        if allocation.phase == "ended":
            return replace(state, kind=allocation.kind, reason=allocation.reason)
        return allocation if allocation.phase == "ending" else state

    def _fetch(self, names: list[str]) -> None:
        for name in names if self._copy is not None else ():
            if (data := self._mailbox.read(self._order.id, name)) is not None:
                (self.directory / name).write_bytes(data)

    def log(self) -> bytes | None:
        """Return the logs of all nodes, one after the other; None before the first line."""
        names = self._order.by_node("log.{}.txt")
        return b"".join(self._mailbox.read(self._order.id, name) or b"" for name in names) or None

    def show_stacks(self) -> None:
        """Do nothing: the agent asks for stacks whenever it ends processes."""

    def cancel(self) -> None:
        """Withdraw the order, and wait until its processes have ended."""
        self._allocation.withdraw(self._order, ended=self._state.phase == "ended")

    def discard(self) -> None:
        """Delete the job's files, and the mailbox if it belongs to this job alone."""
        self._allocation.orders.pop(self._order.id, None)
        if self._copy is not None:
            self._copy.remove()
        self._mailbox.discard(self._order, self._files)
        if not self._allocation.settings.hold:
            self._mailbox.remove(self._allocation.agents)
            del self._held[self._allocation.name]


def agent_command(python: str, allocation: Allocation, *options: str) -> list[str]:
    """Return the command that starts an agent."""
    options += ("--idle-s", str(allocation.settings.idle_s))
    options += () if allocation.settings.hold else ("--once",)
    return [*module(python, "stages.execution.agent"), allocation.mailbox.url, *options]


def wait_until_gone(is_gone: Callable[[], bool], what: str) -> None:
    """Wait for a scheduler to end something. Raises :class:`UnavailableError` if it does not."""
    deadline_s = time.monotonic() + END_TIMEOUT_S
    while not is_gone():
        if time.monotonic() > deadline_s:
            raise UnavailableError(f"{what} did not end within {END_TIMEOUT_S:g} s")
        time.sleep(LOOK_S)
