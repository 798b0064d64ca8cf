"""A run on disk, stage by stage, without Prefect: what stages are tested with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_rl_core.config.recipe import check
from flows.plan import freeze, make_plan
from flows.requests import Run
from stages.artifacts import Artifact, input_of
from stages.contracts import Request
from stages.manifest import Manifest
from stages.outcome import Outcome
from stages.runner import Settings, execute
from tests import other_device, tiny_pipelines
from tests.stages.ranks import run_on_ranks


@pytest.fixture(scope="session")
def device(device: torch.device) -> torch.device:
    """Where stages compute, which they choose themselves: on a GPU or a CPU."""
    return torch.device("cpu") if device == other_device.DEVICE else device


@pytest.fixture(scope="session")
def wan_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_pipelines.save_wan(tmp_path_factory.mktemp("pipelines") / "wan"))


@pytest.fixture(scope="session")
def prompt_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("prompts")
    (folder / "train.txt").write_text('a "b" c\na "d" e\n', encoding="utf-8")
    return str(folder)


def make_run(tmp_path: Path, values: dict[str, Any], name: str = "run") -> Run:
    """Plan and freeze a recipe given as plain values."""
    plan = make_plan(check(values, "test"), name, "test.toml")
    return Run(freeze(plan, str(tmp_path)), str(tmp_path))


def make(request: Request, tmp_path: Path, **settings: Any) -> Manifest:
    """Run a stage in this process."""
    chosen = {"threads": 1, "deterministic": True, "numerics_record": None, "allow_numerics_change": False} | settings
    outcome = tmp_path / "outcome"
    return execute(request, Settings(outcome=outcome, **chosen), Outcome(outcome, 0))


def make_on_ranks(
    request: Request,
    tmp_path: Path,
    ranks: int,
    *extra_argv: str,
    timeout_s: float = 120.0,
    before: Callable[[], None] | None = None,
    gpus: bool = False,
) -> Manifest:
    """Run a stage on so many ranks of a real gloo group, each a process: seconds, because nothing is imported again.

    ``extra_argv`` goes to ``stages.runner``; ``before`` runs first on every rank, and is a function of a module.
    With ``gpus`` each has one, and their group NCCL.
    Raises :class:`tests.stages.ranks.RanksFailed` with what each rank said if one fails or ``timeout_s`` is over.
    Torchrun and its launcher are tested in ``test_distributed.py``.
    """
    path = tmp_path / f"{request.stage}.json"
    path.write_text(request.model_dump_json(), encoding="utf-8")
    run_on_ranks([str(path), *extra_argv], tmp_path, ranks, timeout_s, before, gpus=gpus)
    return Artifact(input_of(request.slot)).manifest
