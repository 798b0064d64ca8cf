"""Supervised steps on media of several sizes: by hand, made again, and on two ranks."""

from pathlib import Path

import numpy as np
import pytest
import torch

from cosmos_rl_core.models._conditioning import stack
from cosmos_rl_core.training.noise_levels import FINE_GRID, DrawKey, sft_time, training_noise
from flows.planning import requests
from stages.artifacts.slots import input_of
from stages.formats.embeddings import Embeddings
from stages.formats.policies import read_part
from stages.training.loading import load_model
from tests.stages.conftest import make, make_on_ranks
from tests.stages.training.test_bucket_training import (
    CPU,
    SHAPES,
    SIZES,
    latents_of,
    metrics,
    pictures,
    shifting,
    started,
)

__all__ = ["pictures", "shifting"]


def test_supervised_steps_take_every_item_once_at_the_levels_of_its_size(pictures: Path, shifting: str, tmp_path: Path):
    """The mean loss of one pass by hand, each item alone."""
    run = started(pictures, shifting, tmp_path, train_batch_per_replica=2 * len(SHAPES))
    request = requests.finetune(run, 0)
    steps = request.config.steps.model_copy(update={"lrs": (1e-3,), "ema_decays": (None,)})  # pyright: ignore[reportAttributeAccessIssue]
    config = request.config.model_copy(update={"steps": steps})
    make(request.model_copy(update={"config": config}), tmp_path)
    latents, model = latents_of(run), load_model(run.plan.model, ("transformer",), CPU)
    texts = Embeddings(request.inputs["embeddings"], latents.prompt_ids)
    levels = {size: model.schedule(FINE_GRID, size, 1).sigmas for size in SIZES}
    assert levels[48, 32] != levels[32, 64] == levels[64, 32]
    losses: list[float] = []
    for epoch in (0, 1):
        for item, prompt in zip(latents.index["item_id"], latents.index["prompt_id"], strict=True):
            key, x_0, size = DrawKey(0, 0, epoch, item), latents[item], latents.size(item)
            assert size is not None
            t = sft_time(levels[size], run.recipe.policy.diffusers.density, key)
            noise = training_noise(tuple(x_0.shape), key, 0)
            with torch.no_grad():
                velocity = model.velocity(
                    ((1 - t) * x_0 + t * noise)[None], torch.tensor([t]), stack([texts[prompt]], CPU)
                )
            losses.append(float((velocity[0] - (noise - x_0)).square().mean()))
    assert metrics(request.slot)["loss"].tolist() == [pytest.approx(np.mean(losses), rel=1e-5)]


def test_a_retry_and_another_micro_batch_size_train_on_the_same_items(pictures: Path, tmp_path: Path):
    run = started(pictures, "package:tiny-sd3", tmp_path)
    request = requests.finetune(run, 0)
    first = make(request, tmp_path)
    again = make(request.model_copy(update={"slot": f"{run.url}/again"}), tmp_path)
    assert again.content == first.content
    alone = request.config.model_copy(
        update={"algorithm": request.config.algorithm.model_copy(update={"mini_batch": 1})}  # pyright: ignore[reportAttributeAccessIssue]
    )
    make(request.model_copy(update={"slot": f"{run.url}/alone", "config": alone}), tmp_path)
    assert metrics(f"{run.url}/alone")["loss"].tolist() == pytest.approx(metrics(request.slot)["loss"], rel=1e-5)


@pytest.mark.processes
@pytest.mark.parametrize("shard", [1, 2])
def test_two_ranks_train_on_the_items_of_one(shard: int, pictures: Path, tmp_path: Path):
    """At the same time on other sizes, with weights of their own and with shared ones.

    If the number of micro-batches is odd, one of the ranks repeats one without weight.
    """
    run = started(pictures, "package:tiny-sd3", tmp_path, train_batch_per_replica=7)
    request = requests.finetune(run, 0)
    make(request, tmp_path)
    both = request.model_copy(update={"slot": f"{run.url}/both"})
    make_on_ranks(both, tmp_path, 2, dp_shard_size=shard)
    assert metrics(both.slot)["loss"].tolist() == pytest.approx(metrics(request.slot)["loss"], rel=1e-6)
    parts = [read_part(input_of(slot), "current") for slot in (request.slot, both.slot)]
    assert all(torch.allclose(parts[0][name], parts[1][name], atol=1e-6) for name in parts[0])
