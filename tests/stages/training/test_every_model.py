"""Every model plugin through every stage of one iteration, as it ships: from its prompts to the stock pipeline."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.conformance.models.families import OF_TEXT, SIZE
from cosmos_rl_core.conformance.tiny_bases import media_of
from flows.planning import requests
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.contracts import METRICS
from stages.formats.policies import read_part
from stages.formats.samples import read_unit
from stages.formats.tables import read_table
from tests.stages.conftest import make, make_evaluated_iteration, make_on_ranks, make_run
from tests.stages.small_video import LORA, recipe
from tests.stages.training.test_sharded_training import PARTS, aside, begun, require_close


def recipe_of(name: str, prompt_dir: str, folder: Path, lora: dict[str, Any] | None) -> dict[str, Any]:
    """NFT on the model's tiny pipeline, which is written below ``folder``."""
    path = str(tiny_pipelines.save(name, folder / "base"))
    values = recipe(path, prompt_dir, lora)
    values["policy"]["diffusers"] |= media_of(path)
    return values


@pytest.mark.parametrize("name", OF_TEXT)
def test_every_model_makes_an_iteration_and_its_evaluation(
    name: str, prompt_dir: str, tmp_path: Path, device: torch.device
):
    values = recipe_of(name, prompt_dir, tmp_path, LORA)
    held_out = tmp_path / "held-out"
    held_out.mkdir()
    (held_out / "test.txt").write_text('x "y" z\n', encoding="utf-8")
    frames = values["policy"]["diffusers"]["train_frames"]
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


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
@pytest.mark.parametrize("name", OF_TEXT)
def test_two_ranks_that_share_weights_make_the_samples_and_policy_of_one(
    name: str, lora: dict[str, Any] | None, prompt_dir: str, tmp_path: Path
):
    run = begun(tmp_path, recipe_of(name, prompt_dir, tmp_path, lora))
    rollout, update = requests.rollout(run, 0), requests.update(run, 0)
    shared = aside(rollout, "shared")
    make_on_ranks(shared, tmp_path, 2, dp_shard_size=2)
    assert input_of(shared.slot).content == input_of(rollout.slot).content
    make(update, tmp_path)
    shared = aside(update, "shared")
    make_on_ranks(shared, tmp_path, 2, dp_shard_size=2)
    require_close(update, shared, PARTS)
