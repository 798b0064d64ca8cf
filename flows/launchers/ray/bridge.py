"""Carry jobs between a flow and a Ray cluster: ``python -m flows.launchers.ray.bridge``, started by the flow.

It is Ray's driver: its actors and reserved nodes end with it, and it ends with the flow. Lines of JSON
(:mod:`flows.launchers.ray._orders`) come by standard input and go to the descriptor that is standard output at first.
"""

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import ray
from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
from ray.exceptions import AuthenticationError, RayError, RpcError

from cosmos_rl_core import outside_plugins
from cosmos_rl_core.errors import ConfigError, CosmosRLError, StageError, UnavailableError
from cosmos_rl_core.process_trees import KILLED
from cosmos_rl_core.processes import die_with_parent
from flows.devices.staying import Processes
from flows.launchers._base import KILLING
from flows.launchers._resident import IDLE_S, MEETING_FILE
from flows.launchers.ray._checks import Checks, paths_in
from flows.launchers.ray._gang import CLOSE_S, Gang, Kind, answer, carry_units
from flows.launchers.ray._orders import Line, Order, Settings, Told, line
from stages.artifacts.request import Request
from stages.execution.execution import Execution
from stages.execution.outcome import Failure

TURN_S = 0.1
"""Interval in seconds at which jobs are looked at."""
ANSWER_S = 2.0
"""Longest wait for the states of all jobs, in seconds. A node that does not answer is asked again."""
SOON_S = 2.0
"""Wait for nodes, in seconds, after which the reason is reported."""
REASON_S = 40.0
"""Wait for the error of another node, in seconds, while the errors so far only report a lost rank."""
HEAD_S = 5.0
"""Interval in seconds at which the head node is asked whether it is there."""
PROCESSES_S = 5.0
"""Interval in seconds at which the flow is told which processes stay."""


@dataclass
class Part:
    """The part of a job on one node."""

    node: Any
    asked: Any = None
    """Answer of the node that was asked for and has not come yet."""
    phase: str = "running"
    exit_code: int | None = None
    failures: dict[str, Failure] = field(default_factory=dict[str, Failure])

    @property
    def lost_another(self) -> bool:
        """Return whether the ranks of the node only report the loss of another rank, and none of them was killed."""
        only = bool(self.failures) and all(one.collective for one in self.failures.values())
        return only and self.exit_code not in KILLING


@dataclass
class Work:
    """A job, from its order to its end."""

    order: Order
    gang: Gang
    stage: str
    paths: tuple[str, ...]
    """Files and folders that its settings name."""
    asked_s: float = field(default_factory=time.monotonic)
    parts: list[Part] = field(default_factory=list[Part])
    failed_s: float | None = None
    units_ended: threading.Event = field(default_factory=threading.Event)
    meets: bool = False
    reason: str = ""


class Bridge:
    """The jobs of one flow, and the gangs that serve them."""

    def __init__(self, settings: Settings, lines: "queue.Queue[Line | None]", say: Callable[..., None]) -> None:
        self._settings, self._lines, self._say = settings, lines, say
        self._works: dict[str, Work] = {}
        self._gangs: list[Gang] = []
        self._checks = Checks(settings.run_url, settings.launch)
        self._processes_s = 0.0
        self._ended: list[str] = []

    def serve(self) -> None:
        """Take orders and watch jobs until the flow ends."""
        while True:
            began_s = time.monotonic()
            with suppress(queue.Empty):
                while (found := self._lines.get(timeout=TURN_S)) is not None:
                    self._take(found)
                    if time.monotonic() - began_s > TURN_S:
                        break
                else:
                    return
            self._look()

    def close(self) -> None:
        """Free all nodes."""
        for gang in self._gangs:
            gang.close()

    def _take(self, found: Line) -> None:
        if found.order is not None:
            order = found.order
            outside_plugins.use(outside_plugins.named_in(order.request.encode()), verify=False)
            request = Request.model_validate_json(order.request)
            paths = paths_in(request.config.model_dump(mode="json"))
            self._works[order.id] = Work(order, self._gang(Kind.of(order.nodes, order.ranks)), request.stage, paths)
        elif (name := found.cancel) is not None:
            if (work := self._works.pop(name, None)) is not None:
                self._stop(work)
            self._say(told=Told(id=name, phase="ended", exit_code=KILLED, reason="it was ended"))
        elif found.show_stacks is not None and (work := self._works.get(found.show_stacks)) is not None:
            for part in work.parts:
                part.node.show_stacks.remote()
        elif found.give_back:
            self._free("the run waited for slots or people")

    def _gang(self, kind: Kind) -> Gang:
        """Return an idle gang of a kind, else reserve one."""
        for gang in self._gangs:
            if gang.kind == kind and not gang.busy:
                gang.busy = True
                return gang
        gang = Gang(kind, self._settings.run_url, self._settings.launch)
        self._gangs.append(gang)
        return gang

    def _free(self, why: str, idle_s: float = 0.0) -> None:
        """Give back the nodes that no job has used for ``idle_s`` seconds."""
        now_s = time.monotonic()
        for gang in [one for one in self._gangs if not one.busy]:
            if now_s - gang.idle_since_s >= idle_s:
                self._drop(gang)
                self._ended = [*self._ended[-2:], f"{', '.join(gang.hosts)}: {why}"]

    def _drop(self, gang: Gang) -> None:
        self._gangs.remove(gang)
        gang.close()

    def _look(self) -> None:
        """Look at all jobs, and tell the flow what is new."""
        for work in list(self._works.values()):
            try:
                if work.parts:
                    self._watch(work)
                else:
                    self._begin(work)
            except CosmosRLError as error:
                self._end(work, Told(id=work.order.id, phase="ended", exit_code=1, kind=error.kind, reason=str(error)))
            except RayError as error:
                hosts = ", ".join(work.gang.hosts) or "the cluster"
                why = f"a node was lost ({hosts}): {str(error).splitlines()[0]}"
                lost = Told(
                    id=work.order.id, phase="ended", exit_code=KILLED, kind="killed", reason=why, node_lost=True
                )
                self._end(work, lost)
        self._free(f"idle for {IDLE_S:.0f} s", IDLE_S)
        if time.monotonic() - self._processes_s > PROCESSES_S:
            self._processes_s = time.monotonic()
            self._say(processes=self._staying().model_dump(mode="json"))

    def _begin(self, work: Work) -> None:
        """Start a job as soon as its nodes are reserved."""
        order = work.order
        if not self._has_nodes(work):
            return
        gang = work.gang
        gang.begin()
        count = len(gang.nodes)
        here = order.ranks // count
        for place, node in enumerate(gang.nodes):
            part = None if count == 1 else (place * here, here, gang.hosts[0])
            wrong = answer(node.begin.remote(order.request, order.execution, fresh=order.fresh, part=part))
            if wrong:
                raise StageError.of(wrong["kind"], wrong["message"])
            work.parts.append(Part(node))
        units = Execution.model_validate_json(order.execution).units
        if units is not None:
            carry_units(gang.nodes[0], Path(units), work.units_ended)
        self._say(told=Told(id=order.id, phase="running"))

    def _has_nodes(self, work: Work) -> bool:
        """Return whether nodes are reserved for a job and passed their checks.

        All nodes that the job may get are checked before it asks for some; then the nodes that it got.
        """
        if not work.gang.is_reserved() and not self._takes_idle(work):
            if work.gang.is_asked_for:
                self._wait(work)
            elif self._checks.passed(work.gang.kind.fitting(ray.nodes()), work.stage, work.paths):
                work.gang.reserve()
            return False
        own = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] in work.gang.ids]
        return self._checks.passed(own, work.stage, work.paths)

    def _takes_idle(self, work: Work) -> bool:
        """Give a waiting job an idle gang of its kind, if there is one; return whether it got one."""
        idle = [gang for gang in self._gangs if gang.kind == work.gang.kind and not gang.busy]
        for gang in idle[:1]:
            self._drop(work.gang)
            work.gang, gang.busy = gang, True
        return bool(idle)

    def _wait(self, work: Work) -> None:
        """Tell why a job waits, and give back idle nodes of other kinds.

        Raises the error of :meth:`Kind.missing` if the cluster has too few nodes for it for too long.
        """
        waits_s, kind = time.monotonic() - work.asked_s, work.gang.kind
        reason = f"waits for {kind}"
        if any(not gang.busy for gang in self._gangs):
            self._free("another stage needed nodes")
        elif waits_s > SOON_S and len(kind.fitting(ray.nodes())) < kind.nodes:
            has = _described(ray.nodes())
            reason += f"; the cluster has {has}"
            if waits_s > self._settings.nodes_timeout_s:
                raise kind.missing(ray.nodes(), has)
        if waits_s > SOON_S and reason != work.reason:
            work.reason = reason
            self._say(told=Told(id=work.order.id, phase="waiting", reason=reason))

    def _watch(self, work: Work) -> None:
        """Ask all nodes of a job, tell the flow what is new, and end the job when all of its parts have ended."""
        for part in work.parts:
            part.asked = part.asked or part.node.poll.remote()
        ready, _ = ray.wait([part.asked for part in work.parts], num_returns=len(work.parts), timeout=ANSWER_S)
        files: dict[str, str] = {}
        log: dict[int, str] = {}
        served_before = False
        for place, part in enumerate(work.parts):
            if part.asked not in ready:
                continue
            found, part.asked = answer(part.asked), None
            part.phase, part.exit_code = found["phase"], found["exit_code"]
            if (address := found["files"].pop(MEETING_FILE, None)) is not None:
                self._meet(work, place, address)
            files |= found["files"]
            log |= {place: found["log"]} if found["log"] else {}
            served_before = served_before or found["served_before"]
            for name in found["files"]:
                if name.startswith("error."):
                    part.failures[name] = Failure.model_validate_json(found["files"][name])
        told = Told(id=work.order.id, phase="running", files=files, log=log, served_before=served_before)
        # A part that only reports the loss of another comes last.
        ended = sorted((part for part in work.parts if part.phase == "ended"), key=lambda part: part.lost_another)
        failed = [part for part in ended if part.exit_code]
        if len(ended) == len(work.parts) or (failed and self._has_reason(work, failed[0])):
            code = failed[0].exit_code if failed else 0
            self._end(work, told.model_copy(update={"phase": "ended", "exit_code": code}))
        elif files or log:
            self._say(told=told)

    def _meet(self, work: Work, place: int, address: str) -> None:
        """Tell the other nodes where their ranks meet rank 0."""
        if place == 0 and not work.meets and len(work.parts) > 1:
            work.meets = True
            answer([part.node.meet_at.remote(address) for part in work.parts[1:]])

    def _has_reason(self, work: Work, failed: Part) -> bool:
        """Return whether the reason of a failure is known, or was waited for long enough."""
        work.failed_s = work.failed_s or time.monotonic()
        return not failed.lost_another or time.monotonic() - work.failed_s > REASON_S

    def _end(self, work: Work, told: Told) -> None:
        """End a job, and tell the flow."""
        del self._works[work.order.id]
        self._stop(work)
        self._say(told=told)

    def _stop(self, work: Work) -> None:
        """End what is left of a job, and release its gang, which serves others if all of its nodes answer."""
        work.units_ended.set()
        gang = work.gang
        if not gang.nodes:
            self._drop(gang)
            return
        try:
            answer([node.end.remote() for node in gang.nodes], timeout=CLOSE_S)
        except RayError:
            self._drop(gang)
        else:
            gang.busy, gang.idle_since_s = False, time.monotonic()

    def _staying(self) -> Processes:
        """Return the processes that stay on all nodes."""
        stay: list[Any] = []
        for gang in self._gangs:
            with suppress(RayError):
                asked = [one.processes.remote() for one in gang.nodes]
                for host, said in zip(gang.hosts, answer(asked, timeout=ANSWER_S), strict=True):
                    found = Processes.model_validate_json(said).stay
                    stay += [one.model_copy(update={"device": f"{host} {one.device}"}) for one in found]
        return Processes(stay=tuple(stay), ended=tuple(self._ended))


def _described(nodes: list[dict[str, Any]]) -> str:
    """Return the nodes of a cluster, in words."""
    alive = [node for node in nodes if node["Alive"]]
    amounts = (f"{node['Resources'].get('CPU', 0):g} CPU, {node['Resources'].get('GPU', 0):g} GPU" for node in alive)
    return f"{len(alive)} nodes ({'; '.join(amounts)})"


def _joined(settings: Settings) -> None:
    """Join the cluster.

    Raises :class:`ConfigError` if it refuses this process, :class:`UnavailableError` if it does not answer.
    """
    deadline_s = time.monotonic() + settings.head_timeout_s
    while True:
        try:
            _reached(settings.address)
            ray.init(address=settings.address, log_to_driver=False, include_dashboard=False)
            return
        except AuthenticationError as error:
            raise ConfigError(
                f"the Ray cluster at {settings.address} does not take this process: {str(error).partition('. ')[0]}. "
                "Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to a file with the token of the cluster"
            ) from error
        except (OSError, TimeoutError, RpcError) as error:
            # Ray says so, too, if there is no cluster at an address that a person mistyped.
            if time.monotonic() > deadline_s:
                raise UnavailableError(
                    f"no Ray cluster answers at {settings.address}: {str(error).splitlines()[0]}. Start one, or let "
                    "this machine join it: ray start --address=HEAD:6379 --num-cpus=0 --num-gpus=0"
                ) from error
            time.sleep(1.0)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"the Ray cluster at {settings.address} does not take this process: {error}") from error


def _reached(address: str) -> None:
    """Raise ``OSError`` if nothing listens there, ``RayError`` if it refuses. Joining alone would try for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
        GcsClient(address=address)


def _ask_head() -> None:
    """Ask the head node from time to time. If it does not answer, or has another cluster, Ray ends this process."""
    while True:
        ray.nodes()
        time.sleep(HEAD_S)


def _read(lines: "queue.Queue[Line | None]") -> None:
    for each in sys.stdin.buffer:
        lines.put(Line.model_validate_json(each))
    lines.put(None)


def main() -> int:
    """Serve one flow."""
    die_with_parent()
    settings = Settings.model_validate_json(sys.stdin.buffer.readline())
    out: IO[bytes] = os.fdopen(os.dup(1), "wb", buffering=0)
    # Only lines go there, whatever Ray and others print.
    os.dup2(2, 1)
    guard, lines = threading.Lock(), queue.Queue["Line | None"]()

    def say(**what: Any) -> None:
        with guard, suppress(BrokenPipeError):
            out.write(line(**what))

    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    try:
        _joined(settings)
        threading.Thread(target=_ask_head, daemon=True).start()
        bridge = Bridge(settings, lines, say)
        try:
            bridge.serve()
        finally:
            bridge.close()
            ray.shutdown()
    except CosmosRLError as error:
        say(failed={"kind": error.kind, "message": str(error)})
        return error.exit_code
    return 0


if __name__ == "__main__":
    # At once: a thread still waits for lines.
    os._exit(main())
