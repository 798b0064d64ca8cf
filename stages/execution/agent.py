"""The agent of an allocation, ``python -m stages.execution.agent MAILBOX``: starts the stages that a flow orders.

The mailbox is a directory that all nodes share, or a URL. The flow is the only writer of ``orders.json``, what it wants
to run now; an agent starts what is new there and ends what is gone from it. What becomes of an order is in files of its
own, so that a flow that comes back needs nothing but its name::

    orders.json            Orders
    agent.<node>           the beat of the newest orders that this agent has carried out
    <order>/returncode.<node>, log.<node>.txt, status.json, error.<rank>.json
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from cosmos_rl_core.config.base import Section
from cosmos_rl_core.errors import UnavailableError
from cosmos_rl_core.process_trees import GRACE_S, kill, tree
from cosmos_rl_core.storage import store
from stages.execution.execution import Execution

TURN_S = 0.5
TREE_INTERVAL_S = 2.0
COPY_INTERVAL_S = 2.0
"""How often status and log of a running stage are copied to a mailbox that is a URL."""
END_GRACE_S = 30.0
"""For ``srun`` to end its step on every node."""
TORCHRUN_FAILED = 1
"""Torchrun's exit code, whatever became of a rank."""
NOT_STARTED = 127
"""Return code of a command that does not exist, as of a shell."""


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


class Orders(Section):
    """What a flow wants of an allocation now."""

    beat: int = 0
    """Grows from 1 whenever the flow writes: while it does, somebody wants the allocation."""
    orders: tuple[Order, ...] = ()


def read_orders(mailbox: str) -> Orders:
    """The newest orders; none before the first, or where they cannot be read."""
    data = store.read_if_exists(store.join(mailbox, "orders.json"))
    try:
        return Orders() if data is None else Orders.model_validate_json(data)
    except ValidationError:
        return Orders()


def is_shared(mailbox: str) -> bool:
    """Whether the mailbox is a directory, in which stages write where the flow reads."""
    return "://" not in mailbox


def returncodes_of(mailbox: str, order: Order) -> list[int | None]:
    """Return how an order ended on each of its nodes; None for one where it still runs."""
    codes = [store.read_if_exists(_returncode(mailbox, order.id, node)) for node in range(order.nodes)]
    return [_number(code) for code in codes]


def returncode_of(mailbox: str, order: Order) -> int | None:
    """Return 0 if an order ended well on every node, the most telling other code if it did not; None while it runs."""
    codes = returncodes_of(mailbox, order)
    failed = [code for code in codes if code]
    if failed:
        return next((code for code in failed if code != TORCHRUN_FAILED), TORCHRUN_FAILED)
    return None if None in codes else 0


def carried_out(mailbox: str, nodes: int) -> int:
    """The beat of the newest orders that the agents of all nodes have carried out; -1 before the first."""
    beats = [_number(store.read_if_exists(_agent(mailbox, node))) for node in range(nodes)]
    return min(-1 if beat is None else beat for beat in beats)


def _number(said: bytes | None) -> int | None:
    """None where nobody said it, or it cannot be read."""
    try:
        return None if said is None else int(said)
    except ValueError:
        return None


def _returncode(mailbox: str, order: str, node: int) -> str:
    return store.join(mailbox, order, f"returncode.{node}")


def _agent(mailbox: str, node: int) -> str:
    return store.join(mailbox, f"agent.{node}")


@dataclass
class Agent:
    """One node's."""

    mailbox: str
    node: int
    idle_s: float
    once: bool
    """End with the first order, instead of waiting for more."""
    _started: "dict[str, Started]" = field(default_factory=dict)
    _beat: int = -1
    _heard_s: float = field(default_factory=time.monotonic)

    def turn(self) -> bool:
        """Carry out what is ordered now. False: nobody needs this allocation any more."""
        with suppress(UnavailableError):  # what runs goes on; a flow that cannot be heard of counts as silent
            self._obey(read_orders(self.mailbox))
        for started in self._started.values():
            with suppress(UnavailableError):  # said at the next turn
                started.look()
        if any(not started.told for started in self._started.values()):
            return True
        if self.once and self._started:
            return False
        return time.monotonic() - self._heard_s < self.idle_s

    def _obey(self, orders: Orders) -> None:
        # A file that is not there for a moment takes nothing back.
        if orders.beat in (0, self._beat):
            return
        wanted = {order.id: order for order in orders.orders if self.node < order.nodes}
        for name, started in self._started.items():
            if name not in wanted:
                started.end()
        for name, order in wanted.items():
            # One that an earlier allocation of this name has ended is still there until the flow has seen it.
            if name not in self._started and store.size(_returncode(self.mailbox, name, self.node)) is None:
                self._started[name] = Started(self.mailbox, order, self.node)
        self._beat, self._heard_s = orders.beat, time.monotonic()
        store.write(_agent(self.mailbox, self.node), str(self._beat).encode())

    def close(self) -> None:
        """End what runs, and say so."""
        for started in self._started.values():
            started.end()
        for started in self._started.values():
            with suppress(UnavailableError):
                started.look()


class Started:
    """An order that was started."""

    def __init__(self, mailbox: str, order: Order, node: int) -> None:
        self.told = False
        """Whether the mailbox has its return code."""
        self._url, self._node = store.join(mailbox, order.id), node
        self._returncode: int | None = None
        self._copied: dict[str, bytes] = {}
        self._copied_s = self._tree_s = 0.0
        self._tree: list[psutil.Process] = []
        self._shared = is_shared(mailbox)
        self._directory = Path(self._url if self._shared else tempfile.mkdtemp(prefix="cosmos-stage-"))
        self._directory.mkdir(parents=True, exist_ok=True)
        self._log = self._directory / f"log.{node}.txt"
        request = self._directory / "request.json"
        request.write_text(order.request, encoding="utf-8")
        Execution.beside(request).write_text(order.execution, encoding="utf-8")
        self._process = self._start(order)

    def _start(self, order: Order) -> "subprocess.Popen[bytes] | None":
        words = {"{directory}": str(self._directory), "{host}": os.uname().nodename}
        command = list(order.command)
        for word, meaning in words.items():
            command = [part.replace(word, meaning) for part in command]
        with self._log.open("ab") as log:
            try:
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=os.environ | order.environment,
                )
            except OSError as error:
                log.write(f"{command[0]} cannot be started: {error}\n".encode())
                self._returncode = NOT_STARTED
                return None

    def look(self) -> None:
        """Pass on progress, and the end."""
        if self.told:
            return
        now_s = time.monotonic()
        if self._process is not None and self._returncode is None:
            if now_s - self._tree_s > TREE_INTERVAL_S:
                self._tree_s, self._tree = now_s, tree(self._process.pid) or self._tree
            self._returncode = self._process.poll()
        if self._returncode is not None:
            # A torchrun that was killed leaves its workers.
            kill(self._tree)
        if not self._shared and (self._returncode is not None or now_s - self._copied_s > COPY_INTERVAL_S):
            self._copied_s = now_s
            self._copy()
        if self._returncode is not None:
            store.write(store.join(self._url, f"returncode.{self._node}"), str(self._returncode).encode())
            self.told = True
            if not self._shared:
                shutil.rmtree(self._directory, ignore_errors=True)

    def _copy(self) -> None:
        for path in (self._directory / "status.json", self._log, *self._directory.glob("error.*.json")):
            data = path.read_bytes() if path.exists() else b""
            if data and self._copied.get(path.name) != data:
                store.write(store.join(self._url, path.name), data)
                self._copied[path.name] = data

    def end(self) -> None:
        """Leave no process: ask first, because only ``srun`` itself can end its step on other nodes."""
        if self._process is None or self._process.poll() is not None:
            return
        self._tree = tree(self._process.pid)
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_GRACE_S)
        kill(self._tree)
        self._process.wait(GRACE_S)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until nobody needs this allocation."""
    args = _parser().parse_args(argv)

    def stop(*_: Any) -> None:
        sys.exit(128 + signal.SIGTERM)

    # By default a container's first process does not hear it.
    signal.signal(signal.SIGTERM, stop)
    agent = Agent(args.mailbox, args.node, args.idle_s, args.once)
    try:
        while agent.turn():
            time.sleep(TURN_S)
    finally:
        agent.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m stages.execution.agent", description="Start the stages a flow orders."
    )
    parser.add_argument("mailbox", help="directory or URL that the flow reads and writes too")
    parser.add_argument("--node", type=int, default=0, help="which of the allocation's agents this is, from 0")
    parser.add_argument(
        "--idle-s", type=float, default=600.0, help="end when nothing runs and no flow was heard of for so long"
    )
    parser.add_argument("--once", action="store_true", help="end with the first order")
    return parser


if __name__ == "__main__":
    sys.exit(main())
