"""A run on disk, stage by stage, without Prefect: what stages are tested with."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.config.recipe import check
from flows.plan import freeze, make_plan
from flows.requests import Run
from stages.artifacts import Artifact, input_of
from stages.contracts import Request
from stages.manifest import Manifest
from stages.outcome import Outcome
from stages.runner import Settings, execute
from tests import tiny_pipelines


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


def make_on_ranks(request: Request, tmp_path: Path, ranks: int) -> Manifest:
    """Run a stage under torch.distributed.run."""
    path = tmp_path / f"{request.stage}.json"
    path.write_text(request.model_dump_json(), encoding="utf-8")
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--nproc-per-node", str(ranks), "-m"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([*command, "stages.runner", str(path)], check=True, env=environment)
    return Artifact(input_of(request.slot)).manifest
