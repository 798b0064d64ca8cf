"""Every model plugin through every stage of one iteration, as it ships: from its prompts to the stock pipeline."""

from pathlib import Path

import pytest
import torch

from cosmos_rl_core import plugins
from cosmos_rl_core.pipelines import directories
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.contracts import METRICS
from stages.formats.policies import read_part
from stages.formats.samples import read_unit
from stages.formats.tables import read_table
from tests import tiny_pipelines
from tests.families import LENGTH, SIZE, frames_of, stock_pipeline
from tests.stages.conftest import make_evaluated_iteration, make_run
from tests.stages.test_wan import LORA, recipe


@pytest.mark.parametrize("name", plugins.known("models"))
def test_an_iteration_and_its_evaluation(name: str, prompt_dir: str, tmp_path: Path, device: torch.device):
    path = str(tiny_pipelines.save(name, tmp_path / "base"))
    held_out = tmp_path / "held-out"
    held_out.mkdir()
    (held_out / "test.txt").write_text('x "y" z\n', encoding="utf-8")
    values = recipe(path, prompt_dir, LORA)
    frames = frames_of(stock_pipeline(path))
    values["policy"]["diffusers"] |= {"inference_size": list(SIZE), "train_frames": frames, "max_prompt_length": LENGTH}
    if directories.spec(path).guardrail_package:
        values["policy"]["diffusers"]["guardrail"] = "off"
    values["policy"]["diffusers"]["sample"] |= {"guidance_scale": 3.0, "eval_num_steps": 2}
    values["validation"] = {"n_generation": 1, "dataset": {"name": "ocr", "local_dir": str(held_out), "split": "test"}}
    run = make_run(tmp_path, values)
    make_evaluated_iteration(run, tmp_path)

    before, after = (read_part(input_of(slot), "current") for slot in (run.slots.policy(0), run.slots.policy(1)))
    assert max(float((after[part] - before[part]).abs().max()) for part in before) > 1e-4
    artifact = Artifact(input_of(run.slots.version(1, "evaluate")))
    assert (artifact.manifest.numerics["device"] == "cpu") == (device.type != "cuda")
    (sample,) = read_unit(artifact, 0)
    assert sample.pixels.shape == (frames, *SIZE, 3)
    assert sample.pixels.std() > 1
    table = read_table(Artifact(input_of(run.slots.policy(1))), METRICS)
    for column in ("loss", "kl"):
        assert (table[f"{column}_max"].to_numpy() >= table[column].to_numpy()).all()
