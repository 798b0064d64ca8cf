"""Jobs inside allocations: what Slurm and Kubernetes share.

An allocation is what a scheduler gives: nodes with an agent (:mod:`stages.execution.agent`) that starts the stages that
are ordered in its mailbox. It is held from stage to stage, or each stage has its own. Its name follows from what is
asked for, so that it is found by name alone, even if the flow that submitted it died before it could write that down.
"""

import secrets
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.config.clusters import Resources
from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import CosmosRLError, UnavailableError
from cosmos_rl_core.storage import store
from flows.launchers._base import NOT_BEGUN, Job, JobState
from flows.launchers._processes import stage_environment
from flows.running.work_folders import WorkFolder
from stages.artifacts.request import Request
from stages.contracts import STAGES
from stages.execution.agent import Order, Orders, carried_out, is_shared, read_orders, returncode_of, returncodes_of
from stages.execution.outcome import has_reason

LOOK_S = 0.5
"""How often the mailbox is read."""
CANCEL_TIMEOUT_S = 90.0
"""For an agent to end a stage; then its allocation is ended."""
LAST_WORDS_S = 40.0
"""For the other nodes to tell why an order fails, while it is only known that ranks lost one another. Torchrun gives
the ranks of its node 30 s to end."""
LOST = -9
BEATS = 5
"""Signs of life that a flow gives within the time after which it counts as silent."""


@dataclass(frozen=True)
class Allocation:
    """What a scheduler is asked for."""

    name: str
    mailbox: str
    agents: int
    """How many agents it has."""
    resources: Resources


class Scheduler(Protocol):
    """Gives allocations. All ids are its own; all methods raise :class:`UnavailableError` if it does not answer."""

    agents_per_node: bool
    """Whether every node has an agent; else the first one's reaches the others."""

    def find(self, allocation: Allocation) -> str | None:
        """The id of one of this name that waits or runs."""
        ...

    def start(self, allocation: Allocation) -> str:
        """Ask for it; returns at once. Raises :class:`ConfigError` if it can never be had."""
        ...

    def state(self, allocation_id: str) -> JobState:
        """How it is."""
        ...

    def end(self, allocation_id: str) -> None:
        """End it, if it has not ended; returns when it is gone."""
        ...

    def command(self, job: Job, allocation: Allocation, order: str) -> list[str]:
        """What an agent starts for a job."""
        ...


@dataclass
class Held:
    """An allocation that this flow has."""

    allocation: Allocation
    id: str = ""
    beat: int = 0
    orders: dict[str, Order] = field(default_factory=dict)
    state: JobState = NOT_BEGUN
    asked_s: float = 0.0
    wrote_s: float = 0.0

    def write(self) -> None:
        """Order what is in ``orders``, and nothing else."""
        self.beat, self.wrote_s = self.beat + 1, time.monotonic()
        orders = Orders(beat=self.beat, orders=tuple(self.orders.values()))
        store.write(store.join(self.allocation.mailbox, "orders.json"), orders.model_dump_json().encode())


@dataclass
class Ordered:
    """A job that this flow watches."""

    order: Order
    held: Held
    directory: Path
    """Where its status and error files are."""
    own: WorkFolder | None = None
    """The same, where it is no part of the mailbox."""
    state: JobState = NOT_BEGUN
    looked_s: float = 0.0
    failed_s: float | None = None
    """When the first of its nodes was found to have failed."""


class AllocatedJobs:
    """See :class:`flows.launchers._base.JobLauncher`; an id is an order's."""

    def __init__(self, run_url: str, config: LaunchConfig, root: str, scheduler: Scheduler) -> None:
        self._config, self._settings = config, config.allocations
        self._run_url, self._root, self._scheduler = run_url, root, scheduler
        self._held: dict[str, Held] = {}
        self._jobs: dict[str, Ordered] = {}

    def reserve(
        self, requests: Sequence[Request], note: Callable[[str], None], check: Callable[[], None]
    ) -> AbstractContextManager[None]:
        """Nothing: the scheduler gives each allocation devices of its own."""
        return nullcontext()

    def submit(self, job: Job) -> str:
        """Order it, and ask for an allocation if there is none."""
        allocation = self._allocation(job)
        held = self._hold(allocation)
        order_id = f"{job.name}-{secrets.token_hex(3)}"
        distributed = STAGES[job.request.stage].distributed
        order = Order(
            id=order_id,
            name=job.name,
            request=job.request.model_dump_json(indent=1),
            execution=job.execution.model_dump_json(indent=1),
            command=tuple(self._scheduler.command(job, allocation, order_id)),
            environment=self._environment(job),
            nodes=allocation.agents if distributed else 1,
        )
        held.orders[order_id] = order
        try:
            # First, so that an allocation never runs without its orders.
            held.write()
            held.id = self._scheduler.find(allocation) or self._scheduler.start(allocation)
        except BaseException:
            del held.orders[order_id]
            raise
        held.state, held.asked_s = NOT_BEGUN, 0.0
        self._watch(held, order)
        return order_id

    def reattach(self, job: Job) -> str | None:
        """Find its order, not yet ended, and an allocation that has it."""
        allocation = self._allocation(job)
        orders = [order for order in read_orders(allocation.mailbox).orders if order.name == job.name]
        orders = [order for order in orders if returncode_of(allocation.mailbox, order) is None]
        if not orders or (found := self._scheduler.find(allocation)) is None:
            return None
        held = self._hold(allocation)
        held.id = found
        held.orders[orders[-1].id] = orders[-1]
        self._watch(held, orders[-1])
        return orders[-1].id

    def poll(self, job_id: str) -> JobState:
        """Look into the mailbox; ask the scheduler now and then."""
        job = self._jobs[job_id]
        now_s = time.monotonic()
        if job.state.phase != "ended" and now_s - job.looked_s > LOOK_S:
            job.looked_s = now_s
            # A store or a scheduler that is away for a while stops nothing; for longer, and the job counts as hung.
            with suppress(UnavailableError):
                self._show_life(now_s)
                job.state = self._look(job, now_s)
        return job.state

    def _look(self, job: Ordered, now_s: float) -> JobState:
        held = job.held
        if (state := self._ended(job, now_s)) is not None:
            return self._why_killed(state, held) if state.killed else state
        if now_s - held.asked_s > self._settings.query_s:
            held.state, held.asked_s = self._scheduler.state(held.id), now_s
        if held.state.phase == "ended":
            # What it still said before that.
            lost = JobState("ended", LOST, held.state.kind, held.state.reason)
            return self._ended(job, now_s, last=True) or lost
        self._fetch(job, ["status.json"])
        return held.state

    def _ended(self, job: Ordered, now_s: float, *, last: bool = False) -> JobState | None:
        """Return how it ended; None while it runs, or while a slower node may still tell the reason of a failure."""
        mailbox = job.held.allocation.mailbox
        code = returncode_of(mailbox, job.order)
        if code is None:
            return None
        self._fetch(job, self._words(job))
        if code != 0 and not last and None in returncodes_of(mailbox, job.order) and not has_reason(job.directory):
            job.failed_s = now_s if job.failed_s is None else job.failed_s
            if now_s - job.failed_s < LAST_WORDS_S:
                return None
        return JobState("ended", code)

    def _why_killed(self, state: JobState, held: Held) -> JobState:
        """The scheduler's reason, once it has taken the allocation back; it kills what runs there first."""
        held.state = self._scheduler.state(held.id)
        if held.state.phase == "ended":
            return replace(state, kind=held.state.kind, reason=held.state.reason)
        return held.state if held.state.phase == "ending" else state

    def _words(self, job: Ordered) -> list[str]:
        """Names of what the stage itself writes."""
        ranks = range(self._config.processes_of(job.order.name.rpartition("-")[0]))
        return ["status.json", *(f"error.{rank}.json" for rank in ranks)]

    def outcome(self, job_id: str) -> Path:
        """In the mailbox, or copied from there."""
        return self._jobs[job_id].directory

    def logs(self, job_id: str) -> bytes | None:
        """One node after the other."""
        job = self._jobs[job_id]
        logs = [store.read_if_exists(store.join(self._url(job), name)) for name in _by_node("log.{}.txt", job)]
        found = [log for log in logs if log is not None]
        return b"".join(found) if found else None

    def cancel(self, job_id: str) -> None:
        """Take the order back, and wait until its agents have noticed; an allocation of its own is ended too."""
        job = self._jobs[job_id]
        held = job.held
        if held.orders.pop(job_id, None) is not None and self._settings.hold and job.state.phase != "ended":
            held.write()
            self._wait_for_agents(held)
        if not self._settings.hold:
            self._scheduler.end(held.id)

    def _wait_for_agents(self, held: Held) -> None:
        deadline_s = time.monotonic() + CANCEL_TIMEOUT_S
        mailbox, agents = held.allocation.mailbox, held.allocation.agents
        while carried_out(mailbox, agents) < held.beat:
            # One that waits has no agents, and one that has ended has none any more.
            if self._scheduler.state(held.id).phase in ("waiting", "ended"):
                return
            if time.monotonic() > deadline_s:
                self._scheduler.end(held.id)
                return
            time.sleep(LOOK_S)

    def discard(self, job_id: str) -> None:
        """Remove its files from the mailbox, or the mailbox if it had one of its own."""
        job = self._jobs.pop(job_id)
        allocation = job.held.allocation
        job.held.orders.pop(job_id, None)
        if job.own is None:
            shutil.rmtree(job.directory, ignore_errors=True)
        else:
            job.own.remove()
        if not is_shared(allocation.mailbox):
            for name in (*self._words(job), *_by_node("returncode.{}", job), *_by_node("log.{}.txt", job)):
                store.remove(store.join(self._url(job), name))
        if not self._settings.hold:
            _forget(allocation)
            del self._held[allocation.name]

    def close(self) -> None:
        """Give all allocations back, also what an earlier flow of this run held and this one had no use for."""
        with suppress(UnavailableError):  # those end by themselves
            for stage in STAGES if self._settings.hold else ():
                allocation = self._shared_allocation(stage, self._config.stage_gpus.get(stage, ()))
                if read_orders(allocation.mailbox).beat:
                    self._hold(allocation)
        with ExitStack() as all_of_them:
            for held in self._held.values():
                all_of_them.callback(self._give_back, held)
        self._held.clear()

    def _give_back(self, held: Held) -> None:
        try:
            # A flow that was interrupted while it submitted does not know the id.
            if allocation_id := held.id or self._scheduler.find(held.allocation):
                self._scheduler.end(allocation_id)
            _forget(held.allocation)
        except CosmosRLError as error:
            print(f"an allocation ends by itself later: {error}", file=sys.stderr)

    def _allocation(self, job: Job) -> Allocation:
        """Where a job runs: in the one that all jobs with the same resources share, or in one of its own."""
        stage = STAGES[job.request.stage]
        if self._settings.hold:
            return self._shared_allocation(stage.name, job.execution.gpus)
        own = self._settings.stages.get(stage.name)
        need = ({} if stage.distributed else {"nodes": 1}) | ({} if stage.torch else {"gpus_per_node": 0})
        given = set() if own is None else own.model_fields_set
        less = {name: n for name, n in need.items() if name not in given}
        return self._named(job.name, self._resources(stage.name, job.execution.gpus).model_copy(update=less))

    def _shared_allocation(self, stage: str, gpus: tuple[int, ...]) -> Allocation:
        resources = self._resources(stage, gpus)
        shared_by = {"run": self._run_url, "resources": resources.model_dump(), "gpus": list(gpus)}
        return self._named(f"cosmos-{digest(shared_by)[:20]}", resources)

    def _named(self, name: str, resources: Resources) -> Allocation:
        agents = resources.nodes if self._scheduler.agents_per_node else 1
        return Allocation(name, store.join(self._root, name), agents, resources)

    def _resources(self, stage: str, gpus: tuple[int, ...]) -> Resources:
        resources = self._settings.resources_of(stage)
        return resources.model_copy(update={"gpus_per_node": len(gpus)}) if gpus else resources

    def _hold(self, allocation: Allocation) -> Held:
        if allocation.name not in self._held:
            self._held[allocation.name] = Held(allocation, beat=read_orders(allocation.mailbox).beat)
        return self._held[allocation.name]

    def _watch(self, held: Held, order: Order) -> None:
        mailbox = held.allocation.mailbox
        shared = is_shared(mailbox)
        own = None if shared else WorkFolder(order.name.rpartition("-")[0])
        directory = Path(store.join(mailbox, order.id)) if own is None else own.path
        self._jobs[order.id] = Ordered(order, held, directory, own)

    def _show_life(self, now_s: float) -> None:
        for held in self._held.values():
            if now_s - held.wrote_s > self._settings.idle_s / BEATS:
                held.write()

    def _fetch(self, job: Ordered, names: list[str]) -> None:
        if is_shared(job.held.allocation.mailbox):
            return
        for name in names:
            if (data := store.read_if_exists(store.join(self._url(job), name))) is not None:
                (job.directory / name).write_bytes(data)

    def _environment(self, job: Job) -> dict[str, str]:
        # One machine's ranks meet on it alone, as they do without a scheduler.
        alone = {"GLOO_SOCKET_IFNAME": "lo"} if self._config.nodes_of(job.request.stage) == 1 else {}
        return alone | stage_environment(self._config)

    def _url(self, job: Ordered) -> str:
        return store.join(job.held.allocation.mailbox, job.order.id)


def _by_node(name: str, job: Ordered) -> list[str]:
    return [name.format(node) for node in range(job.order.nodes)]


def _forget(allocation: Allocation) -> None:
    """Remove the mailbox; the agents' words before the orders, whose beat they must not be ahead of."""
    for node in range(allocation.agents):
        store.remove(store.join(allocation.mailbox, f"agent.{node}"))
    store.remove(store.join(allocation.mailbox, "orders.json"))
    if is_shared(allocation.mailbox):
        shutil.rmtree(allocation.mailbox, ignore_errors=True)


def rendezvous_port(order: str) -> int:
    """A port that two stages on one node hardly share: from 20000 to 29999."""
    return 20000 + int(digest(order)[:8], 16) % 10000


def wait_until_gone(is_gone: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Wait for a scheduler to end something. Raises :class:`UnavailableError` if it does not."""
    deadline_s = time.monotonic() + timeout_s
    while not is_gone():
        if time.monotonic() > deadline_s:
            raise UnavailableError(f"{what} did not end within {timeout_s:g} s")
        time.sleep(LOOK_S)
