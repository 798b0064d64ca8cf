"""The diffusion loss on held-out media: against a loop by hand, on one rank and on two."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cosmos_rl_core import seeds
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.training.noise_levels import DrawKey, training_noise
from flows.planning import requests
from flows.planning.run import Run
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.contracts import Validate
from stages.formats.embeddings import Embeddings
from stages.formats.latents import Latents
from stages.formats.tables import read_table
from stages.training.loading import load_model
from tests.stages.conftest import make, make_on_ranks, make_run
from tests.stages.training.test_sharded_training import aside

CPU = torch.device("cpu")
ITEMS, LEVELS, SEED = 5, 8, 3
RECIPE: dict[str, Any] = {
    "policy": {
        "model_name_or_path": "package:tiny-sd3",
        "lora": {"r": 2, "target_modules": ["to_q"]},
        "diffusers": {"inference_size": [32, 64], "max_prompt_length": 12},
    },
    "train": {
        "num_iterations": 1,
        "train_policy": {"type": "sft", "dataset": {"name": "rendered_text", "num_items": 8}},
    },
    "validation": {
        "seed": SEED,
        "batch_size": 2,
        "dataset": {"name": "ocr", "split": "test"},
        "data": {"name": "rendered_text", "split": "test", "num_items": ITEMS},
    },
}


def run_of(tmp_path: Path, name: str, seed: int = 0, batch_size: int = 2, model: str = "package:tiny-sd3") -> Run:
    """A run whose base policy can be judged."""
    values = copy.deepcopy(RECIPE)
    values["policy"]["model_name_or_path"] = model
    values["train"]["seed"] = seed
    values["validation"]["batch_size"] = batch_size
    run = make_run(tmp_path, values, name)
    for request in (requests.policy(run), run.prepared.held_out.embeds[0], run.prepared.held_out.encodes[0]):
        make(request, tmp_path)
    return run


def own_noise(shape: tuple[int, ...], item: str, level: int) -> torch.Tensor:
    return torch.from_numpy(seeds.normal(shape, "validation noise", SEED, item, level))


def noise_of_first_pass(shape: tuple[int, ...], item: str, level: int) -> torch.Tensor:
    """What supervised training with this seed adds to an item when it first sees it."""
    return training_noise(shape, DrawKey(SEED, 0, 0, item), level)


@torch.no_grad()
def by_hand(run: Run, noise_of: Callable[..., torch.Tensor] = own_noise) -> dict[str, list[float]]:
    """The losses of each item at each level, one forward pass each. A fresh LoRA changes nothing."""
    request = requests.validate(run, 0)
    assert isinstance(request.config, Validate)
    model = load_model(request.config.model, ("transformer",), CPU)
    latents = Latents(request.inputs["data"])
    embeddings = Embeddings(request.inputs["embeddings"], list(latents.index["prompt_id"]))
    losses: dict[str, list[float]] = {}
    for item, prompt in zip(latents.index["item_id"], latents.index["prompt_id"], strict=True):
        conditioning = embeddings[prompt].each(lambda value: value[None])
        x_0 = latents[item][None]
        for level in range(LEVELS):
            t = torch.tensor([(level + 0.5) / LEVELS], device=CPU)
            noise = noise_of(tuple(x_0.shape[1:]), item, level)[None]
            velocity = model.velocity(torch.lerp(x_0, noise, t.item()), t, conditioning)
            losses.setdefault(item, []).append(float((velocity - noise + x_0).square().mean()))
    return losses


def test_the_loss_is_the_mean_squared_error_of_velocities_at_fixed_levels(tmp_path: Path):
    run = run_of(tmp_path, "one")
    manifest = make(requests.validate(run, 0), tmp_path)
    table = read_table(Artifact(input_of(run.slots.version(0, "validate"))), contracts.Validate.LOSSES)
    expected = by_hand(run)
    assert list(table["t"][:LEVELS]) == [(level + 0.5) / LEVELS for level in range(LEVELS)]
    found = {str(item): list(part["loss"]) for item, part in table.groupby("item_id")}
    assert found.keys() == expected.keys()
    for item, losses in expected.items():
        assert found[item] == pytest.approx(losses, rel=1e-5)
    # An item on both sides is not judged at the noise that it was trained on.
    assert all(
        found[item][0] != pytest.approx(trained[0], rel=1e-3)
        for item, trained in by_hand(run, noise_of_first_pass).items()
    )
    means = torch.tensor([sum(losses) / LEVELS for losses in expected.values()], dtype=torch.float64)
    assert manifest.summary["loss"] == pytest.approx(float(means.mean()), rel=1e-6)
    assert manifest.summary["standard_error"] == pytest.approx(float(means.std() / ITEMS**0.5), rel=1e-4)


@pytest.mark.processes
def test_runs_of_other_seeds_draw_the_same_noise_and_two_ranks_find_the_same_bytes(tmp_path: Path):
    one, two, alone = run_of(tmp_path, "one"), run_of(tmp_path, "two", seed=1), run_of(tmp_path, "alone", batch_size=1)
    found = make(requests.validate(one, 0), tmp_path)
    assert make_on_ranks(requests.validate(two, 0), tmp_path, ranks=2).content == found.content
    assert make(requests.validate(alone, 0), tmp_path).summary["loss"] == pytest.approx(found.summary["loss"], rel=1e-5)


@pytest.mark.processes
def test_ranks_that_share_weights_find_equal_bytes_in_bfloat16_also_with_uneven_work(tmp_path: Path):
    run = run_of(tmp_path, "run")
    half, shared = (aside(requests.validate(run, 0), name, param_dtype="bfloat16") for name in ("half", "shared"))
    found = make(half, tmp_path)
    # Three batches on two ranks.
    assert make_on_ranks(shared, tmp_path, 2, dp_shard_size=2).content == found.content
    exact = make(requests.validate(run, 0), tmp_path).summary["loss"]
    assert found.summary["loss"] != exact
    assert found.summary["loss"] == pytest.approx(exact, rel=0.02)


def test_a_policy_without_finite_losses_has_no_loss_and_the_items_are_counted(tmp_path: Path):
    folder = tmp_path / "broken"
    shutil.copytree(directories.resolve_path("package:tiny-sd3"), folder)
    (file,) = (folder / "transformer").glob("*.safetensors")
    weights = load_file(file)
    weights["proj_out.bias"][0] = torch.nan
    file.unlink()
    save_file(weights, file)
    run = run_of(tmp_path, "run", model=str(folder))
    summary = make(requests.validate(run, 0), tmp_path).summary
    assert summary.items() >= {"loss": None, "standard_error": None, "items": ITEMS, "nonfinite": ITEMS}.items()
    losses = read_table(Artifact(input_of(run.slots.version(0, "validate"))), contracts.Validate.LOSSES)["loss"]
    assert not np.isfinite(losses).any()
