"""What a flow and the agents of an allocation tell each other: files in a directory that all nodes share, or at a URL.

The flow is the only writer of ``orders.json``: the stages that it wants now. An agent starts what is new there and ends
what is gone. Results of an order are files of their own, so that a later flow needs nothing but the mailbox's name::

    orders.json            Orders
    agent.<node>           the beat of the newest orders that this agent has carried out
    <order>/returncode.<node>, log.<node>.txt, status.json, error.<rank>.json
"""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import ValidationError

from cosmos_rl_core.config.base import Section
from cosmos_rl_core.storage import store

TORCHRUN_FAILED = 1
"""Torchrun's exit code, whatever became of a rank."""


class Order(Section):
    """One try of one stage."""

    id: str
    """The name, and what tells this try from others."""
    name: str
    """The job's: from its Request's digest."""
    request: str
    """JSON of the Request, which the agent writes as ``request.json`` into the order's directory."""
    execution: str
    """JSON of the :class:`Execution`, which it writes beside it."""
    command: tuple[str, ...]
    """``{directory}`` stands for the order's directory, ``{host}`` for the host that the agent is on."""
    environment: dict[str, str] = {}
    nodes: int = 1
    """How many of the allocation's agents take part, from the first."""

    def by_node(self, name: str) -> list[str]:
        """Return the name of a file of each node, such as ``log.{}.txt``."""
        return [name.format(node) for node in range(self.nodes)]


class Orders(Section):
    """What a flow wants of an allocation now."""

    beat: int = 0
    """Grows from 1 whenever the flow writes: while it does, somebody wants the allocation."""
    orders: tuple[Order, ...] = ()


@dataclass(frozen=True)
class Mailbox:
    """The files of one allocation."""

    url: str

    @property
    def is_shared(self) -> bool:
        """Whether it is a directory, in which stages write where the flow reads."""
        return "://" not in self.url

    def path(self, *names: str) -> str:
        """Return the path or URL of a file."""
        return store.join(self.url, *names)

    def read(self, *names: str) -> bytes | None:
        """Return the bytes of a file, None if it is absent."""
        return store.read_if_exists(self.path(*names))

    def orders(self) -> Orders:
        """Return the newest orders; none before the first, or if they cannot be read."""
        data = self.read("orders.json")
        try:
            return Orders() if data is None else Orders.model_validate_json(data)
        except ValidationError:
            return Orders()

    def write(self, orders: Orders) -> None:
        """Replace the orders."""
        store.write(self.path("orders.json"), orders.model_dump_json().encode())

    def carried_out(self, agents: int) -> int:
        """Return the beat of the newest orders that all agents have carried out; -1 before the first."""
        beats = [_number(self.read(f"agent.{node}")) for node in range(agents)]
        return min(-1 if beat is None else beat for beat in beats)

    def carry_out(self, node: int, beat: int) -> None:
        """Write that the agent of a node has carried out the orders of a beat."""
        store.write(self.path(f"agent.{node}"), str(beat).encode())

    def end(self, order: Order, node: int, returncode: int) -> None:
        """Write how an order ended on a node."""
        store.write(self.path(order.id, f"returncode.{node}"), str(returncode).encode())

    def has_ended(self, order: Order, node: int) -> bool:
        """Return whether an order has ended on a node."""
        return store.size(self.path(order.id, f"returncode.{node}")) is not None

    def returncodes(self, order: Order) -> list[int | None]:
        """Return how an order ended on each of its nodes; None for one where it still runs."""
        return [_number(self.read(order.id, name)) for name in order.by_node("returncode.{}")]

    def returncode(self, order: Order) -> int | None:
        """Return 0 if an order succeeded on every node, else the most telling other code; None while it runs."""
        codes = self.returncodes(order)
        failed = [code for code in codes if code]
        if failed:
            return next((code for code in failed if code != TORCHRUN_FAILED), TORCHRUN_FAILED)
        return None if None in codes else 0

    def discard(self, order: Order, names: Iterable[str]) -> None:
        """Delete the files of an order; at a URL ``names`` and what its agents wrote."""
        if self.is_shared:
            shutil.rmtree(self.path(order.id), ignore_errors=True)
            return
        for name in (*names, *order.by_node("returncode.{}"), *order.by_node("log.{}.txt")):
            store.remove(self.path(order.id, name))

    def remove(self, agents: int) -> None:
        """Delete the mailbox: the agents' files before the orders, whose beat they must not be ahead of."""
        for name in (*(f"agent.{node}" for node in range(agents)), "orders.json"):
            store.remove(self.path(name))
        if self.is_shared:
            shutil.rmtree(self.url, ignore_errors=True)


def _number(data: bytes | None) -> int | None:
    """Return the number in a file; None if the file is absent or cannot be read."""
    try:
        return None if data is None else int(data)
    except ValueError:
        return None
