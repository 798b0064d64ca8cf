"""Files that make the cluster of a profile: batch scripts for Slurm, a stream of YAML for KubeRay."""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from cosmos_rl_core import shipped
from cosmos_rl_core.config.clusters import KubernetesPods
from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ConfigError, mistakes_in
from cosmos_rl_core.recipes.reading import launch_of
from flows.clusters import kinds
from flows.clusters.kinds import kinds_of

NAME = "cosmos-flows"
"""Name of the job and of the cluster, and prefix of the names of files."""
LEAST_MIN = 15
"""Shortest time limit of a job in minutes. Slurm warns it 5 minutes before its end, and it is queued again then."""


@dataclass(frozen=True)
class File:
    """A file to be written."""

    name: str
    text: str


def slurm(profile: str, launch: LaunchConfig, command: Sequence[str]) -> list[File]:
    """Return the batch script of a flow and, with Ray, a batch script for each further kind of nodes.

    Raises one :class:`ConfigError` with all mistakes.
    """
    _refuse(profile, _slurm_mistakes(launch, command))
    if launch.launcher == "slurm":
        stages = [launch.slurm, *(launch.slurm.resources_of(stage) for stage in launch.slurm.stages)]
        most = {
            "nodes": max(one.nodes for one in stages),
            "gpus": max(one.gpus_per_node for one in stages),
            "cpus": max(one.cpus_per_node or 0 for one in stages),
        }
        return [File(f"{NAME}.sbatch", _filled("slurm.sbatch.j2", profile=profile, slurm=launch.slurm, **most))]
    own = {stage: launch.slurm.resources_of(stage) for stage in launch.slurm.stages}
    found: list[File] = []
    for kind in kinds_of(launch, launch.slurm, own):
        template, name = ("ray-nodes.sbatch.j2", f"{NAME}-{kind.name}") if kind.name else ("ray.sbatch.j2", NAME)
        text = _filled(template, profile=profile, kind=kind, job=name, setup=launch.slurm.setup)
        found.append(File(f"{name}.sbatch", text))
    return found


def kuberay(profile: str, launch: LaunchConfig, command: Sequence[str]) -> list[File]:
    """Return the manifests of a Ray cluster and, if a command is given, of the pod in which it runs.

    Raises one :class:`ConfigError` with all mistakes.
    """
    _refuse(profile, _kuberay_mistakes(launch))
    own = {stage: launch.kubernetes.pods_of(stage) for stage in launch.kubernetes.stages}
    found = kinds_of(launch, launch.kubernetes, own)
    text = _filled(
        "kuberay.yaml.j2",
        name=NAME,
        kubernetes=launch.kubernetes,
        kinds=found,
        scales=any(kind.settings.min_nodes is not None for kind in found),
        on_cpus=KubernetesPods(),
        profile=shipped.path_of(profile, "cluster profile").read_text(encoding="utf-8"),
        command=list(command),
        environment=launch.environment,
        ray_version=_ray_version(),
    )
    return [File(f"{NAME}.yaml", text)]


SCHEDULERS: dict[str, Callable[[str, LaunchConfig, Sequence[str]], list[File]]] = {"kuberay": kuberay, "slurm": slurm}


def render(scheduler: str, profile: str, command: Sequence[str]) -> list[File]:
    """Return the files of a cluster. Raises :class:`ConfigError` with all mistakes of the profile."""
    if scheduler not in SCHEDULERS:
        raise ConfigError(f"unknown scheduler {scheduler!r}; known: {', '.join(SCHEDULERS)}")
    return SCHEDULERS[scheduler](profile, launch_of(profile), command)


def write(files: Sequence[File], folder: Path) -> None:
    """Create a folder and write files into it. Raises :class:`ConfigError`, and writes none, if one exists."""
    if there := [str(folder / file.name) for file in files if (folder / file.name).exists()]:
        raise ConfigError(f"{', '.join(there)} exists already; delete it, or name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        (folder / file.name).write_text(file.text, encoding="utf-8")


def _refuse(profile: str, mistakes: Iterator[str]) -> None:
    if found := list(mistakes):
        raise mistakes_in(profile, found)


def _slurm_mistakes(launch: LaunchConfig, command: Sequence[str]) -> Iterator[str]:
    own = launch.slurm.stages
    if command:
        yield f"the command {shlex.join(command)} is given to the batch script: sbatch {NAME}.sbatch COMMAND"
    if launch.launcher == "local":
        yield "launcher = 'local' needs no batch script; set launcher = 'slurm', or 'ray' for several kinds of nodes"
    for place, nodes in (("", launch.slurm), *((f"stages.{stage}.", nodes) for stage, nodes in own.items())):
        if (limit := nodes.time_limit_min) is not None and limit < LEAST_MIN:
            yield f"launch.slurm.{place}time_limit_min = {limit}: Slurm warns 5 minutes before; give {LEAST_MIN}"
    if launch.launcher == "ray":
        yield from kinds.mistakes_in(launch, "slurm", {stage: launch.slurm.resources_of(stage) for stage in own})


def _kuberay_mistakes(launch: LaunchConfig) -> Iterator[str]:
    if launch.launcher != "ray":
        yield f"launcher = {launch.launcher!r} has no Ray cluster; set launcher = 'ray'"
    if not launch.kubernetes.image:
        yield "launch.kubernetes.image is missing: the image of all pods, as deployments/Dockerfile makes it"
    if launch.ray.address != "auto":
        yield f"launch.ray.address = {launch.ray.address!r}; leave it out: the flow's pod joins the cluster"
    own = {stage: launch.kubernetes.pods_of(stage) for stage in launch.kubernetes.stages}
    yield from kinds.mistakes_in(launch, "kubernetes", own)
    for kind in kinds_of(launch, launch.kubernetes, own):
        if (least := kind.settings.min_nodes) is not None and least > kind.count:
            where = f"launch.kubernetes.stages.{kind.name}" if kind.name else "launch.kubernetes"
            yield f"{where}.min_nodes = {least} is above the {kind.count} nodes that stages need"


def _ray_version() -> str:
    """Return the version of Ray in ``requirements.lock``, from which the image is made."""
    lock = shipped.files("deployments")["requirements.lock"].read_text(encoding="utf-8")
    found = re.search(r"^ray==(\S+)", lock, re.MULTILINE)
    assert found is not None
    return found[1]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("flows.clusters"),
        autoescape=False,  # no template is HTML
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters |= {"quoted": shlex.quote, "json": json.dumps}
    return environment


def _filled(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(values)
