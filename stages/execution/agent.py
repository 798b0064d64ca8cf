"""The agent of an allocation, which starts the stages that a flow orders: ``python -m stages.execution.agent``."""

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

from cosmos_rl_core.errors import UnavailableError
from cosmos_rl_core.process_trees import Watched
from cosmos_rl_core.storage import store
from stages.artifacts.request import REQUEST
from stages.execution.execution import Execution
from stages.execution.mailbox import Mailbox, Order, Orders
from stages.execution.outcome import STATUS

SUMMARY = "Start the stages that a flow orders."
TURN_S = 0.5
COPY_INTERVAL_S = 2.0
"""Interval in seconds at which status and log of a running stage are copied to a mailbox that is a URL."""
END_GRACE_S = 30.0
"""Wait in seconds for ``srun`` to end its step on every node."""
NOT_STARTED = 127
"""Return code of a command that cannot be started, equal to a shell's."""


@dataclass
class Agent:
    """The agent of one node."""

    mailbox: Mailbox
    node: int
    idle_s: float
    once: bool
    """Whether the agent ends after its first order, instead of waiting for more."""
    _started: "dict[str, Started]" = field(default_factory=dict)
    _beat: int = -1
    _heard_s: float = field(default_factory=time.monotonic)

    def turn(self) -> bool:
        """Carry out the newest orders. Return False if the allocation is no longer needed."""
        # Running stages continue. Without orders, the flow counts as silent.
        with suppress(UnavailableError):
            self._obey(self.mailbox.orders())
        self._look()
        if any(not started.reported for started in self._started.values()):
            return True
        if self.once and self._started:
            return False
        return time.monotonic() - self._heard_s < self.idle_s

    def _obey(self, orders: Orders) -> None:
        # A file that is missing for a moment withdraws nothing.
        if orders.beat in (0, self._beat):
            return
        wanted = {order.id: order for order in orders.orders if self.node < order.nodes}
        for name, started in self._started.items():
            if name not in wanted:
                started.end()
        for name, order in wanted.items():
            # An order that an earlier allocation has ended stays in the file until the flow has seen its end.
            if name not in self._started and not self.mailbox.has_ended(order, self.node):
                self._started[name] = Started(self.mailbox, order, self.node)
        self._beat, self._heard_s = orders.beat, time.monotonic()
        self.mailbox.carry_out(self.node, self._beat)

    def _look(self) -> None:
        for started in self._started.values():
            with suppress(UnavailableError):  # the next turn tries again
                started.look()

    def close(self) -> None:
        """End all running stages and report their ends."""
        for started in self._started.values():
            started.end()
        self._look()


class Started:
    """A started order."""

    def __init__(self, mailbox: Mailbox, order: Order, node: int) -> None:
        self.reported = False
        """Whether its return code is in the mailbox."""
        self._mailbox, self._order, self._node = mailbox, order, node
        self._copied: dict[str, bytes] = {}
        self._copied_s = 0.0
        shared = mailbox.path(order.id) if mailbox.is_shared else None
        self._directory = Path(shared or tempfile.mkdtemp(prefix="cosmos-stage-"))
        self._directory.mkdir(parents=True, exist_ok=True)
        self._log = self._directory / f"log.{node}.txt"
        request = self._directory / REQUEST
        request.write_text(order.request, encoding="utf-8")
        Execution.beside(request).write_text(order.execution, encoding="utf-8")
        self._process = self._start()

    def _start(self) -> Watched | None:
        directory, host = str(self._directory), os.uname().nodename
        command = [word.replace("{directory}", directory).replace("{host}", host) for word in self._order.command]
        environment = os.environ | self._order.environment
        with self._log.open("ab") as log:
            try:
                nothing = subprocess.DEVNULL
                return Watched(subprocess.Popen(command, env=environment, stdin=nothing, stdout=log, stderr=log))
            except OSError as error:
                log.write(f"{command[0]} cannot be started: {error}\n".encode())
                return None

    def look(self) -> None:
        """Copy progress to the mailbox, and report the end."""
        if self.reported:
            return
        returncode = NOT_STARTED if self._process is None else self._process.poll()
        if returncode is not None:
            # A killed torchrun leaves its workers.
            self.end()
        now_s = time.monotonic()
        due = returncode is not None or now_s - self._copied_s > COPY_INTERVAL_S
        if due and not self._mailbox.is_shared:
            self._copied_s = now_s
            self._copy()
        if returncode is not None:
            self._mailbox.end(self._order, self._node, returncode)
            self.reported = True
            if not self._mailbox.is_shared:
                shutil.rmtree(self._directory, ignore_errors=True)

    def _copy(self) -> None:
        errors = self._directory.glob("error.*.json")
        for path in (self._directory / STATUS, self._log, *errors):
            data = path.read_bytes() if path.exists() else b""
            if data and self._copied.get(path.name) != data:
                store.write(self._mailbox.path(self._order.id, path.name), data)
                self._copied[path.name] = data

    def end(self) -> None:
        """End the processes, first by SIGTERM, because only ``srun`` itself can end its step on other nodes.

        Processes of this node that still run write their stacks to the log before.
        """
        if self._process is not None:
            self._process.show_stacks()
            self._process.end(END_GRACE_S)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the allocation is no longer needed."""
    parser = argparse.ArgumentParser(prog="python -m stages.execution.agent", description=SUMMARY)
    parser.add_argument("mailbox", help="directory or URL by which the flow gives orders")
    parser.add_argument("--node", type=int, default=0, help="number of this agent, from 0")
    idle = "end after so many seconds without stages and without new orders"
    parser.add_argument("--idle-s", type=float, default=600.0, help=idle)
    parser.add_argument("--once", action="store_true", help="end after the first order")
    args = parser.parse_args(argv)

    def stop(*_: Any) -> None:
        sys.exit(128 + signal.SIGTERM)

    # The first process of a container ignores SIGTERM by default.
    signal.signal(signal.SIGTERM, stop)
    agent = Agent(Mailbox(args.mailbox), args.node, args.idle_s, args.once)
    try:
        while agent.turn():
            time.sleep(TURN_S)
    finally:
        agent.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
