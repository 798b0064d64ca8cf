"""The mailbox of an allocation: files by which flow and agents communicate, in a shared directory or at a URL.

Only the flow writes ``orders.json``, the stages that shall run. An agent starts orders that are new and ends orders
that are missing. The results of an order are separate files, so a later flow needs only the mailbox's name::

    orders.json            Orders
    agent.<node>           beat of the newest orders that this agent has carried out
    <order>/returncode.<node>, log.<node>.txt, status.json, error.<rank>.json
"""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import ValidationError

from cosmos_rl_core.config.base import Section
from cosmos_rl_core.storage import store

_ORDERS = "orders.json"
TORCHRUN_FAILED = 1
"""Torchrun's exit code for every failure of a rank."""


class Order(Section):
    """One attempt of one stage."""

    id: str
    """The name with a suffix that is unique to this attempt."""
    name: str
    """Name of the job: its stage and its Request's digest."""
    request: str
    """JSON of the Request, which the agent writes to ``request.json`` in the order's directory."""
    execution: str
    """JSON of the execution, which the agent writes beside it."""
    command: tuple[str, ...]
    """Command to start. ``{directory}`` stands for the order's directory, ``{host}`` for the agent's host."""
    environment: dict[str, str] = {}
    nodes: int = 1
    """Number of agents that take part, from the first."""

    def by_node(self, name: str) -> list[str]:
        """Return the name of a file of each node, for example ``log.{}.txt``."""
        return [name.format(node) for node in range(self.nodes)]


class Orders(Section):
    """All orders of a flow to an allocation."""

    beat: int = 0
    """Number that grows from 1 with each write. While it grows, a flow needs the allocation."""
    orders: tuple[Order, ...] = ()


@dataclass(frozen=True)
class Mailbox:
    """The files of one mailbox."""

    url: str

    @property
    def is_shared(self) -> bool:
        """Return whether the mailbox is a directory, which stages write to and the flow reads from."""
        return "://" not in self.url

    def path(self, *names: str) -> str:
        """Return the path or URL of a file."""
        return store.join(self.url, *names)

    def read(self, *names: str) -> bytes | None:
        """Return the bytes of a file, None if it is absent."""
        return store.read_if_exists(self.path(*names))

    def orders(self) -> Orders:
        """Return the newest orders; none before the first, or if they cannot be read."""
        data = self.read(_ORDERS)
        try:
            return Orders() if data is None else Orders.model_validate_json(data)
        except ValidationError:
            return Orders()

    def write(self, orders: Orders) -> None:
        """Replace the orders."""
        store.write(self.path(_ORDERS), orders.model_dump_json().encode())

    def carried_out(self, agents: int) -> int:
        """Return the beat of the newest orders that all agents have carried out; -1 before the first."""
        beats = [_number(self.read(f"agent.{node}")) for node in range(agents)]
        return min(-1 if beat is None else beat for beat in beats)

    def carry_out(self, node: int, beat: int) -> None:
        """Record that the agent of a node has carried out the orders of a beat."""
        store.write(self.path(f"agent.{node}"), str(beat).encode())

    def end(self, order: Order, node: int, returncode: int) -> None:
        """Record the return code of an order on a node."""
        store.write(self.path(order.id, f"returncode.{node}"), str(returncode).encode())

    def has_ended(self, order: Order, node: int) -> bool:
        """Return whether an order has ended on a node."""
        return store.size(self.path(order.id, f"returncode.{node}")) is not None

    def returncodes(self, order: Order) -> list[int | None]:
        """Return an order's return code on each of its nodes; None where it still runs."""
        return [_number(self.read(order.id, name)) for name in order.by_node("returncode.{}")]

    def returncode(self, order: Order) -> int | None:
        """Return 0 if an order succeeded on every node, else the most specific other code; None while it runs."""
        codes = self.returncodes(order)
        failed = [code for code in codes if code]
        if failed:
            return next((code for code in failed if code != TORCHRUN_FAILED), TORCHRUN_FAILED)
        return None if None in codes else 0

    def discard(self, order: Order, names: Iterable[str]) -> None:
        """Delete the files of an order; at a URL those in ``names`` and those of agents."""
        if self.is_shared:
            shutil.rmtree(self.path(order.id), ignore_errors=True)
            return
        for name in (*names, *order.by_node("returncode.{}"), *order.by_node("log.{}.txt")):
            store.remove(self.path(order.id, name))

    def remove(self, agents: int) -> None:
        """Delete the mailbox. Agents' files go first, because their beat must not exceed that of the orders."""
        for name in (*(f"agent.{node}" for node in range(agents)), _ORDERS):
            store.remove(self.path(name))
        if self.is_shared:
            shutil.rmtree(self.url, ignore_errors=True)


def _number(data: bytes | None) -> int | None:
    """Return the number in a file; None if the file is absent or cannot be read."""
    try:
        return None if data is None else int(data)
    except ValueError:
        return None
