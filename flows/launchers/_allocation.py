"""Allocations: what a scheduler gives, and what a flow orders there.

An allocation is nodes with an agent (:mod:`stages.execution.agent`) that starts the stages that are ordered in its
mailbox. Its name follows from what is asked for, so that it is found by name alone, even if the flow that submitted it
died before it could write that down.
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
"""How often the mailbox is read."""
CANCEL_TIMEOUT_S = 90.0
"""For an agent to end a stage; then its allocation is ended."""
BEATS = 5
"""Signs of life that a flow gives within the time after which it counts as silent."""


@dataclass(frozen=True)
class Allocation:
    """What a scheduler is asked for."""

    name: str
    mailbox: Mailbox
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
        """Where it is ordered what to do."""
        return self.allocation.mailbox

    def start(self, order: Order) -> None:
        """Give an order, and ask the scheduler for the allocation if it has none of this name."""
        self.orders[order.id] = order
        try:
            # First, so that an allocation never runs without its orders.
            self._write()
            self.id = self.scheduler.find(self.allocation) or self.scheduler.start(self.allocation)
        except BaseException:
            del self.orders[order.id]
            raise
        self._state, self._asked_s = NOT_BEGUN, 0.0

    def state(self, at_most_every_s: float = 0.0) -> JobState:
        """Return how it is, or was when the scheduler was last asked."""
        now_s = time.monotonic()
        if now_s - self._asked_s > at_most_every_s:
            self._state, self._asked_s = self.scheduler.state(self.id), now_s
        return self._state

    def renew(self) -> None:
        """Write the orders again if its agents could take this flow for dead."""
        if time.monotonic() - self._wrote_s > self.settings.idle_s / BEATS:
            self._write()

    def withdraw(self, order: Order, *, ended: bool) -> None:
        """Take an order back, and wait until its agents have noticed; an allocation of its own is ended too."""
        if self.orders.pop(order.id, None) is not None and self.settings.hold and not ended:
            self._write()
            self._wait_for_agents()
        if not self.settings.hold:
            self.scheduler.end(self.id)

    def _wait_for_agents(self) -> None:
        deadline_s = time.monotonic() + CANCEL_TIMEOUT_S
        while self.mailbox.carried_out(self.allocation.agents) < self._beat:
            # One that waits has no agents, and one that has ended has none any more.
            if self.scheduler.state(self.id).phase in ("waiting", "ended"):
                return
            if time.monotonic() > deadline_s:
                self.scheduler.end(self.id)
                return
            time.sleep(LOOK_S)

    def release(self) -> None:
        """End it, and remove its mailbox."""
        try:
            # A flow that was interrupted while it submitted does not know the id.
            if allocation_id := self.id or self.scheduler.find(self.allocation):
                self.scheduler.end(allocation_id)
            self.mailbox.remove(self.allocation.agents)
        except CosmosRLError as error:
            print(f"an allocation ends by itself later: {error}", file=sys.stderr)

    def _write(self) -> None:
        self._beat, self._wrote_s = self._beat + 1, time.monotonic()
        self.mailbox.write(Orders(beat=self._beat, orders=tuple(self.orders.values())))


def agent_command(python: str, mailbox: Mailbox, settings: Holding, *options: str) -> list[str]:
    """Return the command of an allocation's agents."""
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
