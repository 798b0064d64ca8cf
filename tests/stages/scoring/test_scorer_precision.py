"""A scorer's version says nothing of TF32: the stage, the service and the command all score with it switched off."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cosmos_rl_core import outside_plugins, plugins
from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.parallel.precision import use_tf32
from cosmos_rl_core.reward_service.worker import Scoring
from cosmos_rl_core.rewards._files.scores import FileScorer
from flows.running.display import Display
from flows.running.wave import Waves
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.execution.outcome import Outcome
from stages.execution.runner import execute
from stages.formats.samples import unit_files
from stages.formats.tables import read_table
from stages.generating.encoding import with_media
from stages.generating.plans import plan_samples
from tests import hand_made
from tests.running_service import image_frame

PLUGIN = '''
"""Score 1 where a GPU would round factors of products or convolutions to TF32."""

from typing import Literal

import torch

from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.config.reward_facts import Facts


class Options(RewardOptions):
    facts = Facts(scores={"rounding": "0 or 1"}, torch=True)
    name: Literal["rounding"] = "rounding"


class Reward:
    version = "rounding 1"

    def __init__(self, options):
        pass

    def check_prompt(self, prompt):
        return None

    def score(self, samples):
        flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        return [{"rounding": float(any(flags))} for _ in samples]
'''


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path) -> Iterator[str]:
    """A reward that sees the switches, in a process whose switches are on."""
    file = tmp_path / "rounding.py"
    file.write_text(PLUGIN, encoding="utf-8")
    outside_plugins.find([str(file)])
    use_tf32(True)
    yield str(file)
    use_tf32(LaunchConfig().tf32)
    outside_plugins.find([])


def test_the_command_scores_files_without_tf32(tmp_path: Path):
    Image.new("RGB", (4, 4)).save(tmp_path / "black.png")
    scorer = FileScorer("rounding")
    (found,) = scorer.score([str(tmp_path / "black.png")], [Prompt(id="p", text="x")])
    assert (scorer.version, found.scores) == ("rounding 1", {"rounding": 0.0})


@pytest.mark.parametrize("batching", ["exact", "fast"])
def test_the_service_scores_without_tf32(tmp_path: Path, batching: str):
    pins = [pin.model_dump(mode="json") for pin in outside_plugins.pins("")]
    setup = {"plugin": "rounding", "options": {"name": "rounding"}, "plugins": pins, "batching": batching}
    scoring = Scoring(setup | {"device": "cpu"})
    (tmp_path / "frame").write_bytes(image_frame("x", reward="rounding"))
    (answer,) = scoring.answers([{"frame": str(tmp_path / "frame")}])
    assert (scoring.version, answer["entries"]) == ("rounding 1", [{"scores": {"rounding": 0.0}}])


def test_the_stage_scores_without_tf32_in_a_run_that_allows_it(tmp_path: Path):
    (plan,) = plan_samples((Prompt(id="p", text="x"),), 1, run_seed=0, iteration=None)
    samples = hand_made.report(str(tmp_path / "samples"), "samples")
    picture = with_media(plan, np.zeros((1, 4, 4, 3), np.uint8), None, {})
    hand_made.make(samples, unit_files(0, [picture]))
    config = contracts.Judge(
        reward=plugins.load("rewards", "rounding").Options(),
        scorer="rounding 1",
        max_attempts=1,
        max_failed_fraction=0.0,
    )
    inputs = {"samples": (input_of(samples.slot),)}
    judging = Request(stage="judge", slot=str(tmp_path / "judge"), iteration=0, seed=0, config=config, inputs=inputs)
    execution = Waves(str(tmp_path), LaunchConfig(tf32=True, deterministic=False), Display()).execution_of(judging)
    execute(judging, execution.model_copy(update={"numerics_record": None}), Outcome(tmp_path / "outcome", 0))
    assert [*read_table(Artifact(input_of(judging.slot)), contracts.Judge.SCORES)["score"]] == [0.0]
    assert not torch.backends.cudnn.allow_tf32
