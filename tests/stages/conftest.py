"""A run on disk, stage by stage, without Prefect: what stages are tested with."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_rl_core.config.parallelism import Parallelism
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.recipes.reading import check
from flows.planning import requests
from flows.planning.plan import freeze, make_plan
from flows.planning.run import Run
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.execution.execution import Execution
from stages.execution.outcome import Outcome
from stages.execution.runner import execute
from tests import other_device
from tests.core.conftest import small_references
from tests.hand_made import rewards
from tests.stages.ranks import run_on_ranks

__all__ = ["small_references"]

FEW_PROMPTS = {"name": "ocr", "local_dir": str(Path(__file__).parents[1] / "e2e" / "words")}
"""A dataset of four prompts: embedding the shipped ones takes as long as the rest of an iteration."""


@pytest.fixture(scope="session")
def device(device: torch.device) -> torch.device:
    """Where stages compute, which they choose themselves: on a GPU or a CPU."""
    return torch.device("cpu") if device == other_device.DEVICE else device


@pytest.fixture(scope="session")
def wan_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_pipelines.save("wan", tmp_path_factory.mktemp("pipelines") / "wan"))


@pytest.fixture(scope="session")
def prompt_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("prompts")
    (folder / "train.txt").write_text('a "b" c\na "d" e\n', encoding="utf-8")
    return str(folder)


def make_run(tmp_path: Path, values: dict[str, Any], name: str = "run") -> Run:
    """Plan and freeze a recipe given as plain values. Without statistics of its own it has no early warning."""
    values = {"early_warning": {"statistics": False}} | values
    plan = make_plan(check(values, "test"), name, "test.toml", store_url=str(tmp_path))
    return Run(freeze(plan, str(tmp_path)), str(tmp_path))


def make(request: Request, tmp_path: Path, **execution: Any) -> Manifest:
    """Run a stage in this process."""
    return execute(request, Execution(**execution), Outcome(tmp_path / "outcome", 0))


def make_iteration(run: Run, folder: Path) -> None:
    """The first iteration of a run with data, from its policy to its update."""
    for request in (
        partial(requests.policy, run),
        lambda: run.prepared.embed,
        lambda: run.prepared.encode,
        partial(requests.rollout, run, 0),
    ):
        make(request(), folder)
    for reward in rewards(run, run.slots.iteration(0, "rollout"), 0):
        make(reward, folder)
    make(requests.update(run, 0), folder)


def make_evaluated_iteration(run: Run, folder: Path) -> None:
    """The first iteration of a run without data, and the evaluation of the policy that it leads to."""
    for request in (partial(requests.policy, run), lambda: run.prepared.embed, partial(requests.rollout, run, 0)):
        make(request(), folder)
    for reward in rewards(run, run.slots.iteration(0, "rollout"), 0):
        make(reward, folder)
    for request in (
        partial(requests.update, run, 0),
        partial(requests.export, run, 1),
        partial(requests.evaluate, run, 1),
    ):
        make(request(), folder)


def make_on_ranks(
    request: Request,
    tmp_path: Path,
    ranks: int,
    *,
    timeout_s: float = 120.0,
    before: Callable[[], None] | None = None,
    gpus: bool = False,
    numerics_record: str | None = None,
    **shared: Any,
) -> Manifest:
    """Run a stage on so many ranks of a real gloo group, each a process: seconds, because nothing is imported again.

    ``shared`` is what they share (:class:`Parallelism`). ``before`` runs first on every rank, and is a function of a
    module.
    With ``gpus`` each has one, and their group NCCL.
    Raises :class:`tests.stages.ranks.RanksFailed` with what each rank said if one fails or ``timeout_s`` is over.
    Torchrun and its launcher are tested in ``tests/flows/running/test_wave_on_ranks.py``.
    """
    path = tmp_path / f"{request.stage}.json"
    path.write_text(request.model_dump_json(), encoding="utf-8")
    Execution(parallelism=Parallelism(world_size=ranks, **shared), numerics_record=numerics_record).write(path)
    run_on_ranks([str(path)], tmp_path, ranks, timeout_s, before, gpus=gpus)
    return Artifact(input_of(request.slot)).manifest
