"""Kinds of nodes of a Ray cluster, and how many of each the stages of a profile need."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from cosmos_rl_core.config.clusters import KubernetesPods, RayNodes, SlurmNodes
from cosmos_rl_core.config.launch import LaunchConfig
from stages.registry import STAGES

S = TypeVar("S", SlurmNodes, KubernetesPods)


@dataclass(frozen=True)
class Kind(Generic[S]):
    """Equal nodes of a cluster."""

    name: str
    """Name of the stage that needs these nodes; empty for the nodes of the stages that do not ask for their own."""
    count: int
    """Number of these nodes that the stages of the profile need at once."""
    gpus: int
    """Number of GPUs of each node."""
    cpus: int
    """Number of CPU cores that stages need on each node."""
    ray: RayNodes
    settings: S
    """Settings with which Slurm or Kubernetes is asked for the nodes."""


def kinds_of(launch: LaunchConfig, settings: S, own: dict[str, S]) -> list[Kind[S]]:
    """Return the kinds of nodes of a profile with ``launcher = "ray"``. The first is of the nodes of ``[launch.ray]``.

    ``own`` has the settings of stages that ask for nodes of their own, by stage.
    """
    stages: dict[tuple[object, ...], list[str]] = {_kind(launch.ray): []}
    for stage in STAGES:
        stages.setdefault(_kind(launch.ray.resources_of(stage)), []).append(stage)
    found: list[Kind[S]] = []
    for named in stages.values():
        nodes = [launch.ray.resources_of(stage) for stage in named] or [launch.ray]
        gpus = max(one.gpus_per_node for one in nodes)
        found.append(
            Kind(
                name=named[0].replace("_", "-") if found else "",
                count=max((_count(launch, stage, gpus) for stage in named), default=1),
                gpus=gpus,
                cpus=max((_cpus(launch, stage, gpus) for stage in named), default=launch.ray.cpus_per_node or 1),
                ray=nodes[0],
                settings=next((own[stage] for stage in named if stage in own), settings),
            )
        )
    return found


def mistakes_in(launch: LaunchConfig, section: str, own: dict[str, S]) -> Iterator[str]:
    """Yield a sentence for each mistake in the nodes that a section of ``[launch]`` gives to single stages."""
    for name, stages in (("ray", launch.ray.stages), (section, own)):
        for stage in stages:
            if stage not in STAGES:
                yield f"launch.{name}.stages.{stage} names no stage; known: {', '.join(sorted(STAGES))}"
    seen: dict[tuple[object, ...], tuple[str, S]] = {}
    for stage, settings in own.items():
        kind = _kind(launch.ray.resources_of(stage))
        first, expected = seen.setdefault(kind, (stage, settings))
        if kind == _kind(launch.ray):
            yield (
                f"launch.{section}.stages.{stage} asks for other nodes, which Ray could not tell from the rest; name "
                f"their accelerator_type or labels in launch.ray.stages.{stage}"
            )
        elif settings != expected:
            yield (
                f"launch.{section}.stages.{stage} and launch.{section}.stages.{first} differ, and both stages have "
                "the same kind of nodes; make them equal, or their labels different (launch.ray.stages)"
            )
    for stage in STAGES:
        gpus, elastic = launch.ray.resources_of(stage).gpus_per_node, launch.elastic_of(stage)
        if elastic and 0 < gpus < (ranks := launch.processes_of(stage)):
            yield f"a worker of {stage} needs {ranks} GPUs, and a node has {gpus} (launch.ray.gpus_per_node)"


def _kind(nodes: RayNodes) -> tuple[object, ...]:
    """Return the accelerator type and the labels, by which Ray tells nodes of different kinds apart."""
    return nodes.accelerator_type, *sorted(nodes.labels.items())


def _count(launch: LaunchConfig, stage: str, gpus: int) -> int:
    """Return the number of nodes of a stage, each with ``gpus`` GPUs."""
    if elastic := launch.elastic_of(stage):
        return -(-elastic.max // _workers(launch, stage, gpus))
    return launch.nodes_of(stage) if STAGES[stage].distributed else 1


def _cpus(launch: LaunchConfig, stage: str, gpus: int) -> int:
    """Return the number of CPU cores of a node of a stage: each worker asks for ``cpus_per_node`` cores."""
    asked = launch.ray.resources_of(stage).cpus_per_node or 1
    return asked * (_workers(launch, stage, gpus) if launch.elastic_of(stage) else 1)


def _workers(launch: LaunchConfig, stage: str, gpus: int) -> int:
    """Return the number of workers of a stage that share the GPUs of a node."""
    return max(1, gpus // launch.processes_of(stage))
