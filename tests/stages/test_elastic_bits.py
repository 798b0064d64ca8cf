"""Real stages whose units workers share: their bits depend on no number of workers."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from flows.planning import requests
from flows.planning.run import Run
from flows.running.display import Display
from flows.running.wave import Waves
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from tests.hand_made import rewards
from tests.stages.conftest import FEW_PROMPTS, make_run

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("elastic")]

VALUES: dict[str, Any] = {
    "policy": {
        "model_name_or_path": "package:tiny-sd3",
        "lora": {},
        "diffusers": {"inference_size": [32, 32], "sample": {"num_steps": 2}},
    },
    "train": {"num_iterations": 1, "train_policy": {"type": "nft", "dataset": FEW_PROMPTS}},
    "rollout": {"n_generation": 4, "n_generation_mini_batch": 2},
    "rewards": [{"fn": {"name": "ocr"}}],
}


def contents(run: Run, **launch: Any) -> dict[str, str]:
    """The content of each stage that is made of units, with these workers."""
    settings = {"mode": "warm", "device": "cpu"} | launch
    found: dict[str, str] = {}
    with closing(Waves(run.url, LaunchConfig.model_validate(settings), Display())) as waves:

        def make(request: Request) -> None:
            waves.make(request.stage, [request])
            found[request.stage] = Artifact(input_of(request.slot)).manifest.content

        make(requests.policy(run))
        assert run.prepared.embed is not None
        make(run.prepared.embed)
        make(requests.rollout(run, 0))
        for reward in rewards(run, run.slots.iteration(0, "rollout"), 0):
            make(reward)
    return found


def test_bits_depend_on_no_number_of_workers(tmp_path: Path) -> None:
    found = [contents(make_run(tmp_path / str(most), VALUES), elastic={"max": most}) for most in (1, 3)]
    assert found[0] == found[1]
    assert {"embed", "rollout", "reward"} <= found[0].keys()
