"""Allocations: nodes that a scheduler gives, each with an agent that starts the stages ordered in its mailbox.

The name of an allocation is a digest of what was requested. A later flow finds it by this name, even if the flow that
submitted it was killed before it could record the scheduler's id. The agent is :mod:`stages.execution.agent`.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from cosmos_rl_core.config.clusters import Holding, Resources
from cosmos_rl_core.errors import CosmosRLError, UnavailableError
from flows.launchers._base import NOT_BEGUN, Job, JobState
from flows.launchers._processes import module
from stages.execution.mailbox import Mailbox, Order, Orders

LOOK_S = 0.5
"""Interval in seconds at which the mailbox is read."""
CANCEL_TIMEOUT_S = 90.0
"""Wait for agents to end a stage, in seconds; then the allocation is ended."""
BEATS = 5
"""Number of times that a flow renews its orders within ``idle_s``."""


@dataclass(frozen=True)
class Allocation:
    """A request to a scheduler."""

    name: str
    mailbox: Mailbox
    agents: int
    """Number of agents."""
    resources: Resources


class Scheduler(Protocol):
    """An interface to Slurm or Kubernetes. All methods raise :class:`UnavailableError` if it does not answer."""

    agents_per_node: bool
    """Whether every node has an agent; else the agent of the first node starts processes on the others."""

    def find(self, allocation: Allocation) -> str | None:
        """Return the id of a waiting or running allocation of this name, None if there is none."""
        ...

    def start(self, allocation: Allocation) -> str:
        """Submit the allocation and return its id at once. Raises :class:`ConfigError` if the scheduler refuses it."""
        ...

    def state(self, allocation_id: str) -> JobState:
        """Return the state of an allocation."""
        ...

    def end(self, allocation_id: str) -> None:
        """End an allocation if it has not ended; return when its processes are gone."""
        ...

    def command(self, job: Job, allocation: Allocation, order: str) -> list[str]:
        """Return the command by which an agent starts a job."""
        ...


@dataclass
class Held:
    """An allocation that this flow uses, with the orders it has given there."""

    allocation: Allocation
    scheduler: Scheduler
    settings: Holding
    id: str = ""
    orders: dict[str, Order] = field(default_factory=dict)
    _state: JobState = NOT_BEGUN
    _asked_s: float = 0.0
    _beat: int = field(init=False)
    _wrote_s: float = 0.0

    def __post_init__(self) -> None:
        self._beat = self.mailbox.orders().beat

    @property
    def mailbox(self) -> Mailbox:
        """Return the mailbox of its agents."""
        return self.allocation.mailbox

    def start(self, order: Order) -> None:
        """Write an order, and submit the allocation if the scheduler has none of this name."""
        self.orders[order.id] = order
        try:
            # Orders come first, so that an allocation never runs without them.
            self._write()
            self.id = self.scheduler.find(self.allocation) or self.scheduler.start(self.allocation)
        except BaseException:
            del self.orders[order.id]
            raise
        self._state, self._asked_s = NOT_BEGUN, 0.0

    def state(self, at_most_every_s: float = 0.0) -> JobState:
        """Return the state, at most ``at_most_every_s`` seconds old."""
        now_s = time.monotonic()
        if now_s - self._asked_s > at_most_every_s:
            self._state, self._asked_s = self.scheduler.state(self.id), now_s
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
            self.scheduler.end(self.id)

    def _wait_for_agents(self) -> None:
        deadline_s = time.monotonic() + CANCEL_TIMEOUT_S
        while self.mailbox.carried_out(self.allocation.agents) < self._beat:
            # A waiting or ended allocation has no agents.
            if self.scheduler.state(self.id).phase in ("waiting", "ended"):
                return
            if time.monotonic() > deadline_s:
                self.scheduler.end(self.id)
                return
            time.sleep(LOOK_S)

    def release(self) -> None:
        """End the allocation and delete its mailbox."""
        try:
            # If the flow was interrupted while it submitted, the id is unknown.
            if allocation_id := self.id or self.scheduler.find(self.allocation):
                self.scheduler.end(allocation_id)
            self.mailbox.remove(self.allocation.agents)
        except CosmosRLError as error:
            print(f"{self.allocation.name} was not ended: {error}; it ends by itself when idle", file=sys.stderr)

    def _write(self) -> None:
        self._beat, self._wrote_s = self._beat + 1, time.monotonic()
        self.mailbox.write(Orders(beat=self._beat, orders=tuple(self.orders.values())))


def agent_command(python: str, mailbox: Mailbox, settings: Holding, *options: str) -> list[str]:
    """Return the command that starts an agent."""
    options += ("--idle-s", str(settings.idle_s))
    options += () if settings.hold else ("--once",)
    return [*module(python, "stages.execution.agent"), mailbox.url, *options]


def wait_until_gone(is_gone: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Wait for a scheduler to end something. Raises :class:`UnavailableError` if it does not."""
    deadline_s = time.monotonic() + timeout_s
    while not is_gone():
        if time.monotonic() > deadline_s:
            raise UnavailableError(f"{what} did not end within {timeout_s:g} s")
        time.sleep(LOOK_S)
