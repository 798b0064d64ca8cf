"""Latents drawn from the VAE's posterior: what is stored, what is drawn, and that nothing else changes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers.translation import translate
from cosmos_rl_core.models._conditioning import stack
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.recipes.reading import check
from cosmos_rl_core.training.noise_levels import FINE_GRID, DrawKey, posterior_noise, sft_time, training_noise
from flows.planning import requests
from flows.planning.plan import make_plan
from flows.planning.run import Run
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.formats.embeddings import Embeddings
from stages.formats.latents import Latents
from stages.formats.policies import read_part
from stages.formats.tables import read_table
from stages.training.loading import load_media, load_model
from tests.core.importers.cosmos_rl.test_recipe_rows import SFT, read, setting
from tests.stages.conftest import make, make_on_ranks, make_run

CPU = torch.device("cpu")
ITEMS, BATCH = 5, 4
WORDS = {"name": "rendered_text", "alphabet": "AB", "num_test_words": 1, "num_items": ITEMS}


def recipe(**diffusers: Any) -> dict[str, Any]:
    size = {"inference_size": [32, 64], "max_prompt_length": 12}
    policy = {"type": "sft", "mini_batch": 2, "steps_per_iteration": 2, "dataset": WORDS}
    return {
        "policy": {"model_name_or_path": "package:tiny-sd3", "diffusers": size | diffusers, "lora": {"r": 2}},
        "train": {"num_iterations": 2, "train_batch_per_replica": BATCH, "optm_lr": 1e-3, "train_policy": policy},
    }


def started(tmp_path: Path, name: str = "run", **diffusers: Any) -> Run:
    run = make_run(tmp_path, recipe(**{"posterior": "sample"} | diffusers), name)
    for request in (requests.policy(run), run.prepared.embed, run.prepared.encode):
        make(request, tmp_path)
    return run


def losses(run: Run, k: int) -> list[float]:
    return read_table(Artifact(input_of(run.slots.policy(k + 1))), "metrics.parquet")["loss"].tolist()


def latents_of(run: Run) -> Latents:
    return Latents([input_of(run.prepared.encode.slot)], posterior="sample")


def test_a_draw_equals_diffusers_for_the_same_noise_shifted_and_scaled_afterwards(tmp_path: Path):
    run = started(tmp_path)
    latents, vae = latents_of(run), load_model(run.plan.base, ("vae",), CPU).pipeline.vae
    mode = Latents([input_of(started(tmp_path, "mode", posterior="mode").prepared.encode.slot)])
    assert run.prepared.encode.config.dataset is not None  # pyright: ignore[reportAttributeAccessIssue]
    media = load_media(run.recipe.train.train_policy.dataset, "", Group(60.0))
    for index, item_id in enumerate(media.item_ids):
        unit = torch.tensor(media.item(index)[0]).float().div(127.5).sub(1).permute(0, 3, 1, 2)
        with torch.no_grad():
            posterior = vae.encode(unit).latent_dist
        assert isinstance(posterior, DiagonalGaussianDistribution)
        key = DrawKey(7, 0, index, item_id)
        noise = posterior_noise(tuple(posterior.mean.shape[1:]), key)
        drawn = posterior.mean + posterior.std * noise
        shift, scale = vae.config.shift_factor or 0.0, vae.config.scaling_factor
        assert torch.allclose(latents.trained(item_id, key), ((drawn - shift) * scale)[0], atol=2e-6)
        # Held-out losses and given frames read the mode, bit for bit what is stored without the setting.
        assert torch.equal(latents[item_id], mode[item_id])
        assert torch.equal(mode.trained(item_id, key), mode[item_id])


def test_draws_have_the_moments_of_the_posterior(tmp_path: Path):
    """4000 draws of one item: each element's mean and deviation, to five standard errors."""
    latents, count = latents_of(started(tmp_path)), 4000
    item = str(latents.index["item_id"].iloc[0])
    draws = torch.stack([latents.trained(item, DrawKey(0, 0, epoch, item)) for epoch in range(count)]).double()
    other = torch.stack([latents.trained(item, DrawKey(1, 0, epoch, item)) for epoch in range(8)])
    (shape,) = {tuple(draw.shape) for draw in other}
    zero, one = DrawKey(0, 0, 0, item), DrawKey(0, 0, 1, item)
    noise = posterior_noise(shape, zero)
    deviation = ((latents.trained(item, zero) - latents[item]) / noise).double()
    errors = (draws.mean(0) - latents[item]) / (deviation / count**0.5)
    assert errors.abs().max() < 5
    assert ((draws.std(0) / deviation - 1).abs().max() * (2 * count) ** 0.5) < 5
    assert abs(float(errors.mean())) < 5 / errors.numel() ** 0.5
    # Another pass, another seed and the noise of the flow are apart.
    assert not torch.equal(noise, posterior_noise(shape, one))
    assert not torch.equal(other[0], draws[0].float())
    assert abs(float(torch.corrcoef(torch.stack([noise, training_noise(shape, zero, 0)]).flatten(1))[0, 1])) < 0.3


def test_training_draws_each_item_anew_in_each_pass(tmp_path: Path):
    """The loss of the first steps by hand; B is 0, so that the base predicts until the weights move."""
    values = recipe(posterior="sample")
    values["train"] |= {"train_batch_per_replica": 2 * ITEMS, "num_iterations": 1}
    values["train"]["train_policy"] |= {"steps_per_iteration": 1}
    run = make_run(tmp_path, values)
    for request in (requests.policy(run), run.prepared.embed, run.prepared.encode):
        make(request, tmp_path)
    make(requests.finetune(run, 0), tmp_path)
    latents, model = latents_of(run), load_model(run.plan.model, ("transformer",), CPU)
    index = latents.index
    texts = Embeddings([input_of(run.prepared.embed.slot)], latents.prompt_ids)
    sigmas = model.schedule(FINE_GRID, (32, 64), 1).sigmas
    found: list[float] = []
    for epoch in (0, 1):
        for item, prompt in zip(index["item_id"], index["prompt_id"], strict=True):
            key = DrawKey(0, 0, epoch, item)
            x_0, t = latents.trained(item, key), sft_time(sigmas, run.recipe.policy.diffusers.density, key)
            noise = training_noise(tuple(x_0.shape), key, 0)
            with torch.no_grad():
                velocity = model.velocity(
                    ((1 - t) * x_0 + t * noise)[None], torch.tensor([t]), stack([texts[prompt]], CPU)
                )
            found.append(float((velocity[0] - (noise - x_0)).square().mean()))
    assert losses(run, 0) == [pytest.approx(np.mean(found), rel=1e-5)]


def test_a_retry_and_another_iteration_length_draw_the_same(tmp_path: Path):
    """Two iterations of two steps, one of them made again, and one iteration of four: the same losses and weights."""
    two = started(tmp_path, "two")
    for k in (0, 1):
        make(requests.finetune(two, k), tmp_path)
    again = requests.finetune(two, 1).model_copy(update={"slot": f"{two.url}/again"})
    assert make(again, tmp_path).content == Artifact(input_of(two.slots.policy(2))).manifest.content
    values = recipe(posterior="sample")
    values["train"] |= {"num_iterations": 1}
    values["train"]["train_policy"] |= {"steps_per_iteration": 4}
    one = make_run(tmp_path, values, "one")
    make(requests.policy(one), tmp_path)
    make(requests.finetune(one, 0), tmp_path)
    assert losses(one, 0) == losses(two, 0) + losses(two, 1)
    parts = [read_part(input_of(run.slots.policy(k)), "current") for run, k in ((one, 1), (two, 2))]
    assert all(torch.equal(parts[0][name], parts[1][name]) for name in parts[0])


@pytest.mark.processes
def test_two_ranks_store_the_bytes_and_draw_the_samples_of_one(tmp_path: Path):
    run = started(tmp_path)
    both = make_on_ranks(run.prepared.encode.model_copy(update={"slot": f"{run.url}/both"}), tmp_path, 2)
    assert both.content == Artifact(input_of(run.prepared.encode.slot)).manifest.content
    make(requests.finetune(run, 0), tmp_path)
    request = requests.finetune(run, 0).model_copy(update={"slot": f"{run.url}/ranks"})
    make_on_ranks(request, tmp_path, 2)
    ranks = read_table(Artifact(input_of(request.slot)), "metrics.parquet")["loss"].tolist()
    assert ranks == pytest.approx(losses(run, 0), rel=1e-6)


def test_only_stages_that_draw_from_the_posterior_get_another_fingerprint(tmp_path: Path):
    mode, sample = (
        Run(make_plan(check(recipe(**given), "test"), "run", "test.toml", (), str(tmp_path)), str(tmp_path))
        for given in ({}, {"posterior": "sample"})
    )
    assert (
        make_plan(check(recipe(posterior="mode"), "test"), None, "t", (), str(tmp_path)).run_id
        == make_plan(check(recipe(), "test"), None, "t", (), str(tmp_path)).run_id
    )
    assert "deviations" not in mode.prepared.encode.config.identity()
    assert sample.prepared.encode.config.identity()["deviations"] is True
    assert mode.prepared.encode.fingerprint != sample.prepared.encode.fingerprint
    assert mode.prepared.embed.fingerprint == sample.prepared.embed.fingerprint
    assert requests.policy(mode).fingerprint == requests.policy(sample).fingerprint


def test_a_vae_without_a_posterior_is_refused_by_its_name(tmp_path: Path):
    values = recipe(posterior="sample", inference_size=[32, 32])
    values["policy"]["model_name_or_path"] = str(tiny_pipelines.save("sana", tmp_path / "sana"))
    with pytest.raises(ConfigError, match=r"posterior = 'sample': AutoencoderDC, the VAE .* set it to 'mode'"):
        make_plan(check(values, "test"), "run", "test.toml", (), str(tmp_path))


def test_imported_supervised_recipes_of_sd3_draw_from_the_posterior_and_say_so():
    values = read("stable-diffusion-3-5-image-sft")
    assert setting(values, "policy.diffusers.posterior") == "sample"
    (line,) = [entry for entry in translate(values).report if "policy.diffusers.posterior" in entry.settings]
    assert (line.written, line.verdict) == ("in cosmos-rl's code", "translated")
    assert "posterior" in line.why
    for other in (SFT, "sana-image-sft", "stable-diffusion-3-5-medium-nft"):
        assert "posterior" not in translate(read(other)).values["policy"]["diffusers"]


def test_a_posterior_is_refused_if_no_media_are_trained_on():
    values = recipe(posterior="sample")
    values["train"]["train_policy"] = {"type": "nft", "dataset": {"name": "ocr"}}
    values |= {"rollout": {"n_generation": 2}, "rewards": [{"fn": {"name": "jpeg"}}]}
    with pytest.raises(ConfigError, match=r"policy\.diffusers\.posterior without effect: nft trains on no media"):
        check(values, "test")
