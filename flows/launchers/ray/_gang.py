"""Nodes of a Ray cluster that are reserved together, each with an actor that starts processes on it."""

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cosmos_rl_core.config.clusters import RayNodes
from cosmos_rl_core.errors import ConfigError, CosmosRLError, UnavailableError
from flows.launchers.ray._node import Node
from stages.execution.handing import connected

CALLS = 64
"""Calls that an actor serves at once: the state, and two for each connection of a worker."""
CLOSE_S = 20.0
"""Seconds that an actor has to end its processes before it is killed, and they with it."""
SHARE = 0.001
"""Amount of an accelerator type that a bundle asks for. Any amount above 0 selects nodes of that type."""

WITHDRAWN = (1, 4)
"""``NodeDeathInfo.Reason`` of Ray: expected, and drained by the autoscaler as idle. Such nodes are not lost."""


answer: Callable[..., Any] = ray.get
"""Returns the answer of an actor, or of several. Raises ``RayError``."""


@dataclass(frozen=True)
class Kind:
    """Nodes that a gang asks the cluster for."""

    nodes: int
    cpus: int
    gpus: int
    """GPUs on each node."""
    accelerator_type: str | None
    labels: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, nodes: RayNodes, ranks: int) -> "Kind":
        """Return the kind of nodes for a stage with ``ranks`` ranks on all nodes together."""
        here = -(-ranks // nodes.nodes)
        cpus = nodes.cpus_per_node or 1
        labels = tuple(sorted(nodes.labels.items()))
        return cls(nodes.nodes, cpus, here if nodes.gpus_per_node else 0, nodes.accelerator_type, labels)

    @property
    def bundle(self) -> dict[str, float]:
        """Return the resources of one node."""
        asked: dict[str, float] = {"CPU": self.cpus, "GPU": self.gpus}
        if self.accelerator_type is not None:
            asked[f"accelerator_type:{self.accelerator_type}"] = SHARE
        return {name: amount for name, amount in asked.items() if amount}

    def __str__(self) -> str:
        each = ", ".join(f"{amount:g} {name}" for name, amount in self.bundle.items() if amount >= 1)
        facts = (("accelerator", self.accelerator_type), *self.labels)
        kind = "".join(f", {name} = {value}" for name, value in facts if value)
        return f"{self.nodes} node{'s' * (self.nodes > 1)} with {each}{' each' if self.nodes > 1 else ''}{kind}"

    def fitting(self, nodes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the nodes of a cluster that are of this kind, whoever uses them."""
        return [node for node in nodes if node["Alive"] and self._fits(node)]

    def missing(self, nodes: Sequence[dict[str, Any]], has: str) -> CosmosRLError:
        """Return the error of a cluster that has too few nodes of this kind. ``has`` describes the nodes that it has.

        It is an :class:`UnavailableError`, so that the stage is tried again, if the hosts that were lost would make up
        the number; else a :class:`ConfigError`.
        """
        here = {node["NodeManagerAddress"] for node in nodes if node["Alive"]}
        dead = [node for node in nodes if not node["Alive"] and node.get("DeathReason") not in WITHDRAWN]
        lost = {node["NodeManagerAddress"] for node in dead} - here
        if lost and len(self.fitting(nodes)) + len(lost) >= self.nodes:
            hosts = ", ".join(sorted(lost))
            return UnavailableError(f"the stage needs {self}, and the Ray cluster has {has}; it lost {hosts}")
        return ConfigError(
            f"the stage needs {self}, and the Ray cluster has {has}; use fewer processes or nodes "
            "(launch.processes, launch.ray), or add nodes"
        )

    def _fits(self, node: dict[str, Any]) -> bool:
        has, labels = node["Resources"], node.get("Labels") or {}
        enough = all(has.get(name, 0) >= amount for name, amount in self.bundle.items())
        return enough and all(labels.get(name) == value for name, value in self.labels)


@dataclass
class Gang:
    """Reserved nodes. They serve one job at a time, and keep their processes from one to the next."""

    kind: Kind
    run_url: str
    launch: str
    nodes: list[Any] = field(default_factory=list[Any])
    """Actors, one a node, the node of rank 0 first; empty before the cluster has room."""
    hosts: list[str] = field(default_factory=list[str])
    busy: bool = True
    idle_since_s: float = 0.0
    """When it became idle by the monotonic clock."""
    ids: list[str] = field(default_factory=list[str])
    """Ray's names of the nodes, once they are reserved."""
    _group: Any = None

    def reserve(self) -> None:
        """Ask the cluster for the nodes."""
        spread = "STRICT_SPREAD" if self.kind.nodes > 1 else "PACK"
        labels = [dict(self.kind.labels)] * self.kind.nodes
        self._group = placement_group(
            [self.kind.bundle] * self.kind.nodes, strategy=spread, bundle_label_selector=labels
        )

    def is_reserved(self) -> bool:
        """Return whether the nodes are reserved."""
        if not self.ids and self._group is not None and self._group.wait(0):
            self.ids = [*placement_group_table(self._group)["bundles_to_node_id"].values()]
        return bool(self.ids)

    @property
    def is_asked_for(self) -> bool:
        """Return whether the cluster was asked for the nodes."""
        return self._group is not None

    def begin(self) -> None:
        """Start the actors, if they have not begun. Raises ``RayError``."""
        if self.nodes:
            return
        actor = ray.remote(Node)
        for place in range(self.kind.nodes):
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place)
            self.nodes.append(
                actor.options(
                    num_cpus=self.kind.cpus,
                    num_gpus=self.kind.gpus,
                    max_restarts=0,
                    max_concurrency=CALLS,
                    scheduling_strategy=strategy,
                ).remote(self.run_url, self.launch)
            )
        self.hosts = self._hosts()

    def _hosts(self) -> list[str]:
        """Return the addresses of the nodes. Raises :class:`ConfigError` if an actor cannot start there."""
        try:
            return answer([node.host.remote() for node in self.nodes])
        except RayActorError as error:
            if "creation task" not in str(error):
                raise
            why = str(error).strip().splitlines()[-1]
            raise ConfigError(f"a node of the Ray cluster cannot start stages: {why}") from error

    def close(self) -> None:
        """End the processes and free the nodes."""
        with suppress(RayError):
            answer([node.close.remote() for node in self.nodes], timeout=CLOSE_S)
        for node in self.nodes:
            with suppress(RayError):
                ray.kill(node)
        if self._group is not None:
            with suppress(RayError):
                remove_placement_group(self._group)


def carry_units(node: Any, folder: Path, ended: threading.Event) -> None:
    """Carry messages between the workers on a node and the launcher's socket in ``folder``, in threads."""

    def accept() -> None:
        while not ended.is_set():
            with suppress(RayError, OSError):
                number = answer(node.accept.remote())
                if number is not None:
                    there = connected(folder)
                    for way in (up, down):
                        threading.Thread(target=way, args=(number, there), daemon=True).start()
            ended.wait(0.1)

    def up(number: int, there: Any) -> None:
        with suppress(RayError, OSError):
            while (data := answer(node.receive.remote(number))) is not None:
                if data:
                    there.sendall(data)
        with suppress(OSError):
            there.shutdown(socket.SHUT_RDWR)

    def down(number: int, there: Any) -> None:
        with suppress(RayError, OSError):
            while data := there.recv(65536):
                answer(node.send.remote(number, data))
            answer(node.send.remote(number, b""))
        there.close()

    threading.Thread(target=accept, daemon=True).start()
