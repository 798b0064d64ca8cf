"""Stages in processes that served others before have the bytes of stages in new processes, whatever the order."""

import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.pipelines.directories import WEIGHTS, resolve_path
from flows.planning import requests
from flows.planning.run import Run
from flows.running.display import Display
from flows.running.wave import Waves
from stages.artifacts.request import Request
from stages.artifacts.slots import current_of
from tests.hand_made import rewards
from tests.stages.conftest import FEW_PROMPTS, make, make_on_ranks, make_run

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("residents")]

RANKS = {"rollout": 2, "update": 2}
VALUES: dict[str, Any] = {
    "policy": {"lora": {}, "diffusers": {"inference_size": [32, 32], "sample": {"num_steps": 2}}},
    "train": {"num_iterations": 1, "train_policy": {"type": "nft", "dataset": FEW_PROMPTS}},
    "rollout": {"n_generation": 2},
    "rewards": [{"fn": {"name": "ocr"}}],
}


def stages(run: Run) -> Iterator[Request]:
    """The stages with torch of one iteration and its export; scores are made between them, in this process."""
    yield requests.policy(run)
    yield run.prepared.embed
    yield requests.rollout(run, 0)
    for reward in rewards(run, run.slots.iteration(0, "rollout"), 0):
        make(reward, Path(run.store_url))
    yield requests.update(run, 0)
    yield requests.export(run, 1)


def content_of(request: Request) -> str:
    manifest = current_of(request.slot)[1]
    assert manifest is not None
    return manifest.content


def damage(weights: Path) -> None:
    """Other weights under the same size and time: only a process that reads them again has other bits."""
    before, stat = weights.read_bytes(), weights.stat()
    weights.write_bytes(before[: len(before) // 2] + bytes(len(before) - len(before) // 2))
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("sharded", [False, True], ids=["whole weights", "shared weights"])
def test_stages_of_one_and_two_ranks_in_mixed_order_have_the_bytes_of_new_processes(
    tmp_path: Path, sharded: bool
) -> None:
    base = Path(shutil.copytree(resolve_path("package:tiny-sd3"), tmp_path / "base"))
    values = VALUES | {"policy": VALUES["policy"] | {"model_name_or_path": str(base)}}
    expected: list[str] = []
    for request in stages(make_run(tmp_path / "new", values)):
        ranks = RANKS.get(request.stage, 1)
        make_on_ranks(request, tmp_path, ranks, dp_shard_size=ranks if sharded else 1)
        expected.append(content_of(request))
    settings = {"mode": "warm", "device": "cpu", "resident_gb": 1, "stage_processes": RANKS}
    settings |= {"dp_shard_size": 2} if sharded else {}
    found: list[str] = []
    pids: set[int] = set()
    with closing(Waves(str(tmp_path), LaunchConfig.model_validate(settings), Display())) as waves:

        def make_stages(some: Iterator[Request]) -> None:
            for request in some:
                waves.make(request.stage, [request])
                found.append(content_of(request))
                ours = psutil.Process().children()
                pids.update(one.pid for one in ours if "stages.execution.warm.resident" in one.cmdline())

        # The first stages of another run come after all others, whose traces they would show.
        later = stages(make_run(tmp_path / "later", values))
        make_stages(stages(make_run(tmp_path / "stay", values)))
        make_stages(islice(later, 2))
        if not sharded:
            # Each process keeps its weights. It keeps none that are sharded, and makes meshes anew.
            damage(base / "transformer" / WEIGHTS)
        make_stages(islice(later, 1))
    assert found == [*expected, *expected[:3]]
    assert len(pids) == 2
