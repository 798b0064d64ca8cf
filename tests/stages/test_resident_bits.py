"""Stages in processes that served others before have the bytes of stages in new processes, whatever the order."""

from collections.abc import Iterator
from contextlib import closing
from itertools import chain, islice
from pathlib import Path

import psutil
import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from flows.planning import requests
from flows.planning.run import Run
from flows.running.display import Display
from flows.running.wave import Waves
from stages.artifacts.request import Request
from stages.artifacts.slots import standing
from tests.hand_made import rewards
from tests.stages.conftest import FEW_PROMPTS, make, make_on_ranks, make_run

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("residents")]

RANKS = {"rollout": 2, "update": 2}
VALUES = {
    "policy": {"model_name_or_path": "package:tiny-sd3", "lora": {}, "diffusers": {"inference_size": [32, 64]}},
    "train": {"num_iterations": 1, "train_policy": {"type": "nft", "dataset": FEW_PROMPTS}},
    "rollout": {"n_generation": 4},
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
    manifest = standing(request.slot)[1]
    assert manifest is not None
    return manifest.content


def test_stages_of_one_and_two_ranks_in_mixed_order_have_the_bytes_of_new_processes(tmp_path: Path) -> None:
    expected: list[str] = []
    for request in stages(make_run(tmp_path / "new", VALUES)):
        make_on_ranks(request, tmp_path, RANKS.get(request.stage, 1))
        expected.append(content_of(request))
    settings = {"mode": "warm", "device": "cpu", "resident_gb": 1, "stage_processes": RANKS}
    found: list[str] = []
    pids: set[int] = set()
    with closing(Waves(str(tmp_path), LaunchConfig.model_validate(settings), Display())) as waves:
        # The first stages of another run come after all others, whose traces they would show.
        later = islice(stages(make_run(tmp_path / "later", VALUES)), 3)
        for request in chain(stages(make_run(tmp_path / "stay", VALUES)), later):
            waves.make(request.stage, [request])
            found.append(content_of(request))
            pids |= {
                one.pid for one in psutil.Process().children() if "stages.execution.warm.resident" in one.cmdline()
            }
    assert found == [*expected, *expected[:3]]
    assert len(pids) == 2
