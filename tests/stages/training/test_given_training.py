"""NFT and supervised training on videos whose first frames are given, through the real stages, by numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_rl_core import plugins, seeds
from cosmos_rl_core.models._conditioning import given_frames, stack
from cosmos_rl_core.models.cosmos_predict2_5 import model as cosmos_predict2_5
from cosmos_rl_core.sampling.schedule import schedule_of
from cosmos_rl_core.training.noise_levels import FINE_GRID, DrawKey, random_times, sft_time, training_noise
from flows.planning import requests
from flows.planning.run import Run
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.formats.embeddings import EMPTY, NEGATIVE, Embeddings
from stages.formats.latents import Latents
from stages.formats.policies import read_part
from stages.formats.samples import key_of
from stages.training.draws import LatentDraws, Stored
from tests.stages.conftest import make, make_iteration, make_run
from tests.stages.training.test_given_rollouts import (
    CPU,
    FRAMES,
    LATENT_FRAMES,
    SCALE,
    SEED,
    advantages_of,
    base,
    normal,
    prompt_conditioning,
    values,
)
from tests.stages.training.test_transitions import table_of, tensors_of

KL = 0.3


def nft(folder: Path) -> dict[str, Any]:
    """One optimizer step at both noise levels of each sample, from rollouts with 2, 1 and 0 given frames."""
    recipe = values(folder)
    recipe["policy"]["diffusers"]["sample"] = {"num_steps": 2, "guidance_scale": SCALE, "solver": "euler"}
    common = {name: recipe["train"]["train_policy"][name] for name in ("dataset", "data", "mini_batch")}
    own = {"type": "nft", "kl_beta": KL, "timesteps_fraction": 1.0, "max_num_conditional_frames": 2}
    recipe["train"]["train_policy"] = common | own
    return recipe


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One iteration of NFT, made."""
    folder = tmp_path_factory.mktemp("given-nft")
    run = make_run(folder, nft(folder / "inputs"))
    make_iteration(run, folder)
    return run


@torch.no_grad()
def velocity_of(model: Any, latents: torch.Tensor, count: int, texts: Any, t: float, noise: torch.Tensor) -> Any:
    """Return the velocity of the base at one video whose first ``count`` latent frames are given."""
    conditioning = stack([texts | given_frames(latents[:, :count], LATENT_FRAMES)], CPU)
    x_t = ((1 - t) * latents + t * noise)[None]
    return model.velocity(x_t, torch.tensor([t], dtype=torch.float32, device=CPU), conditioning)[0]


def test_nft_videos_begin_with_frames_of_data_and_only_other_frames_train(run: Run):
    """At the weights of the rollout the loss is 5 times the square error of x_0 over its mean absolute error, of the
    velocity that is guided as the rollout's was."""
    latents, prompts = Latents([input_of(run.prepared.encode.slot)]), prompt_conditioning(run)
    sigmas = schedule_of(base(run).scheduler, 2).sigmas
    losses: list[float] = []
    counts: list[int] = []
    for sample_id, (about, tensors) in tensors_of(run).items():
        count, x_0 = about["given_frames"], tensors["latents"]
        assert count == 0 or torch.equal(x_0[:, :count], latents[about["given_item"]][:, :count])
        key = DrawKey(SEED, 0, 0, key_of(0, sample_id))
        for place, t in enumerate(random_times(sigmas, 2, key)):
            noise = training_noise(tuple(x_0.shape), key, place)
            conditional, unconditional = (
                velocity_of(base(run), x_0, count, prompts[name], t, noise) for name in (about["prompt_id"], NEGATIVE)
            )
            velocity = unconditional + SCALE * (conditional - unconditional)
            assert (velocity - conditional)[:, count:].abs().max() > 1e-3
            error = (t * (noise - x_0 - velocity))[:, count:].double()
            losses.append(float(5 * error.square().mean() / error.abs().mean()))
        counts.append(count)
    assert sorted(counts) == [0, 0, 1, 1, 2, 2]
    metrics = table_of(Artifact(input_of(run.slots.policy(1))), "metrics.parquet").iloc[0]
    assert metrics["policy_loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert (metrics["kl"], metrics["old_deviation"]) == (0, 0)
    before, after = (read_part(input_of(slot), "current") for slot in (run.slots.policy(0), run.slots.policy(1)))
    assert max(float((after[name] - before[name]).abs().max()) for name in before) > 1e-4


def test_neither_nfts_loss_nor_its_gradient_depends_on_what_is_predicted_at_given_frames(run: Run):
    """It depends on the prediction of none of its three policies there, by the mask that the stage gives it."""
    options = run.recipe.train.train_policy
    algorithm = plugins.load("algorithms", options.type).Algorithm(options)
    stored = Stored.read(requests.update(run, 0), advantages_of(run), ["current"])
    draws = LatentDraws(stored, (SEED, 0), schedule_of(base(run).scheduler, 2).sigmas, 2)
    micro = draws(sorted(stored.prompt_ids), 0, [0], 1.0)
    batch, given = micro.batch, (micro.conditioning["conditional_mask"] == 1).expand(-1, 4, -1, 2, 2)
    assert given.flatten(1).sum(1).unique().tolist() == [0, 16, 32]
    parts = {part: normal(seed, batch.x_t) for seed, part in enumerate(algorithm.needs.roles)}
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for wrong in (0.0, 9.0):
        said = {part: velocity + wrong * (seed + 1) * given for seed, (part, velocity) in enumerate(parts.items())}
        current = said["current"].requires_grad_()
        loss = algorithm.loss(said.__getitem__, batch).per_sample
        (gradient,) = torch.autograd.grad(loss.sum(), current)
        assert gradient[given].count_nonzero() == 0
        assert (gradient[~given] != 0).all()
        found.append((loss.detach(), gradient))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def sft(folder: Path) -> dict[str, Any]:
    """One optimizer step on two passes over the four clips, by micro-batches of other sizes."""
    recipe = values(folder)
    clips = recipe["train"]["train_policy"]["data"]
    recipe["train"] |= {
        "train_batch_per_replica": 8,
        "train_policy": {
            "type": "sft",
            "dataset": clips,
            "mini_batch": 3,
            "steps_per_iteration": 1,
            "max_num_conditional_frames": 2,
            "text_dropout": 0.5,
        },
    }
    del recipe["rollout"], recipe["rewards"], recipe["policy"]["diffusers"]["sample"]
    return recipe


def test_supervised_training_gives_each_item_its_own_first_frames_and_drops_texts(tmp_path: Path):
    run = make_run(tmp_path, sft(tmp_path / "inputs"))
    for request in (requests.policy(run), run.prepared.embed, run.prepared.encode):
        make(request, tmp_path)
    make(requests.finetune(run, 0), tmp_path)
    dataset = run.recipe.train.train_policy.dataset
    media: Any = plugins.load("datasets", dataset.name).Media(dataset)
    model = cosmos_predict2_5.load(run.recipe.policy.model_name_or_path, ("transformer", "vae"), CPU)
    texts = Embeddings([input_of(run.prepared.embed.slot)], [*(prompt.id for prompt in media.prompts), EMPTY])
    sigmas, density = schedule_of(model.scheduler, FINE_GRID).sigmas, run.recipe.policy.diffusers.density
    losses: list[float] = []
    counts: set[int] = set()
    dropped: list[bool] = []
    for epoch in (0, 1):
        for index in range(len(media)):
            pixels, prompt = media.item(index)
            assert len(pixels) == FRAMES
            x_0, key = (
                model.encode_media(torch.from_numpy(pixels)[None])[0],
                DrawKey(SEED, 0, epoch, media.item_ids[index]),
            )
            noise, t = training_noise(tuple(x_0.shape), key, 0), sft_time(sigmas, density, key)
            count = int(seeds.generator("given frames", SEED, 0, epoch, key.sample_id).integers(0, 3))
            dropped.append(seeds.generator("text dropout", *key).random() < 0.5)
            velocity = velocity_of(model, x_0, count, texts[EMPTY if dropped[-1] else prompt.id], t, noise)
            losses.append(float((velocity - (noise - x_0))[:, count:].square().mean()))
            counts.add(count)
    assert counts == {0, 1, 2}
    assert 0 < sum(dropped) < len(dropped)
    metrics = table_of(Artifact(input_of(run.slots.policy(1))), "metrics.parquet").iloc[0]
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    before, after = (read_part(input_of(slot), "current") for slot in (run.slots.policy(0), run.slots.policy(1)))
    assert max(float((after[name] - before[name]).abs().max()) for name in before) > 1e-4
