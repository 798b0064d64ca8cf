"""Videos that begin with frames of the data: from the rollout's states to what the update trains on."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_rl_core import plugins, seeds
from cosmos_rl_core.algorithms._base import Batch, Transitions
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.models._base import guided_velocity
from cosmos_rl_core.models._conditioning import given_frames, stack
from cosmos_rl_core.models.cosmos_predict2_5 import model as cosmos_predict2_5
from cosmos_rl_core.pipelines.spec import CONDITIONAL_LATENTS
from cosmos_rl_core.sampling.schedule import schedule_of
from cosmos_rl_core.sampling.solvers import kernel_of
from cosmos_rl_core.storage import media
from cosmos_rl_core.training.noise_levels import FINE_GRID
from flows.planning import requests
from flows.planning.run import Run
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.formats.embeddings import NEGATIVE, Embeddings
from stages.formats.latents import Latents
from stages.formats.samples import key_of
from stages.training.draws import DataDraws, Stored, TransitionDraws
from tests.stages.conftest import make, make_iteration, make_run
from tests.stages.small_video import LORA, recipe
from tests.stages.training.test_transitions import table_of, tensors_of

CPU = torch.device("cpu")
SEED = 7
"""Draws 2, 1 and 0 given frames for the three prompts."""
PROMPTS = ('a "b" c', 'a "d" e', 'a "f" g')
CAPTIONS = (PROMPTS[0], PROMPTS[0], PROMPTS[2], "a clip")
"""The second prompt has no clip of its own."""
FRAMES, LATENT_FRAMES, TRAINED = 9, 3, (0, 1)
SCALE, DATA_BETA = 3.0, 0.5


def values(folder: Path, **options: Any) -> dict[str, Any]:
    """DDRL on clips of 9 frames of noise, 3 latent ones: two samples of each prompt in one optimizer step."""
    (folder / "clips").mkdir(parents=True)
    for number, caption in enumerate(CAPTIONS):
        pixels = np.random.default_rng(number).integers(0, 256, (FRAMES, 16, 16, 3), dtype=np.uint8)
        (folder / f"clips/{number}.mkv").write_bytes(media.encode(pixels)[1])
        (folder / f"clips/{number}.json").write_text(json.dumps({"prompt": caption}), encoding="utf-8")
    (folder / "train.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    values = recipe(str(tiny_pipelines.save("cosmos_predict2_5", folder / "cosmos")), str(folder), LORA)
    values["policy"]["diffusers"] |= {
        "guardrail": "off",
        "max_prompt_length": 200,
        "train_frames": FRAMES,
        "sample": {"num_steps": 3, "guidance_scale": SCALE, "solver": "flow_sde"},
    }
    values["train"]["seed"] = SEED
    values["train"]["train_policy"] = {
        "type": "ddrl",
        "mini_batch": 2,
        "train_on": TRAINED,
        "data_beta": DATA_BETA,
        "text_dropout": 0.0,
        "max_num_conditional_frames": 2,
        "dataset": {"name": "ocr", "local_dir": str(folder)},
        "data": {"name": "local", "local_dir": str(folder / "clips"), "size": [16, 16], "frames": FRAMES},
    } | options
    values["rollout"] = {"n_generation": 2, "n_generation_mini_batch": 3, "samples_per_shard": 6}
    return values


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One iteration, made."""
    folder = tmp_path_factory.mktemp("given")
    run = make_run(folder, values(folder / "inputs"))
    make_iteration(run, folder)
    return run


def latents_of(run: Run) -> Latents:
    return Latents([input_of(run.prepared.encode.slot)])


def prompt_conditioning(run: Run) -> Embeddings:
    ids = [prompt.id for prompt in run.plan.embedded_prompts]
    return Embeddings([input_of(run.prepared.embed.slot)], [*ids, NEGATIVE])


@cache
def model_of(path: str) -> Any:
    return cosmos_predict2_5.load(path, ("transformer",), CPU)


def base(run: Run) -> Any:
    """The model that made the rollout: version 0 is exactly the base."""
    return model_of(run.recipe.policy.model_name_or_path)


def kernel(run: Run) -> Any:
    sample = run.recipe.policy.diffusers.sample.rollout
    return kernel_of(sample, lambda: schedule_of(base(run).scheduler, sample.num_steps))


def test_every_state_of_a_sample_begins_with_the_latents_of_its_prompts_item(run: Run):
    latents, captions = latents_of(run), {prompt.id: prompt.text for prompt in run.plan.embedded_prompts}
    caption_of = {
        item: captions[p] for item, p in zip(latents.index["item_id"], latents.index["prompt_id"], strict=True)
    }
    found: dict[str, set[tuple[int, str | None]]] = {}
    for about, tensors in tensors_of(run).values():
        count, item = about["given_frames"], about.get("given_item")
        found.setdefault(about["prompt"], set()).add((count, item))
        states = [tensor for name, tensor in tensors.items() if name == "latents" or name.startswith("state.")]
        assert len(states) == 1 + len(TRAINED) + 1
        for state in states:
            assert item is None or torch.equal(state[:, :count], latents[item][:, :count])
            # Of the rest, which is generated, nothing is the item's.
            assert all((state[:, count:] != latents[i][:, count:]).all() for i in caption_of)
        expected = seeds.generator(SEED, "given frames", 0, about["prompt_id"]).integers(0, 3)
        assert count == expected
    assert all(len(drawn) == 1 for drawn in found.values()), "samples of a prompt differ in what they were given"
    given = {prompt: next(iter(drawn)) for prompt, drawn in found.items()}
    assert {count for count, _ in given.values()} == {0, 1, 2}
    for prompt, (count, item) in given.items():
        assert (item is None) == (count == 0)
        assert item is None or prompt == PROMPTS[1] or caption_of[item] == prompt


@torch.no_grad()
def test_the_stored_density_counts_generated_frames_alone_and_the_ratio_is_exactly_1(run: Run):
    latents, prompts, model = latents_of(run), prompt_conditioning(run), base(run)
    for about, tensors in tensors_of(run).values():
        count = about["given_frames"]
        first = latents[about["given_item"]][:, :count] if count else torch.zeros(4, 0, 2, 2, device=CPU)
        own = stack([prompts[about["prompt_id"]] | given_frames(first, LATENT_FRAMES)], CPU)
        negative = stack([prompts[NEGATIVE]], CPU)
        for place, index in enumerate(TRAINED):
            step, x, x_next = kernel(run).steps[index], tensors[f"state.{index}"], tensors[f"state.{index + 1}"]
            t = torch.tensor([step.t], dtype=torch.float32, device=CPU)
            velocity = guided_velocity(model, step.input_scale * x[None], t, own, negative, SCALE)[0]
            center = (step.keep * x + step.push * velocity)[:, count:].double()
            expected = torch.distributions.Normal(center, step.std).log_prob(x_next[:, count:].double()).mean()
            assert float(tensors["log_prob"][place]) == pytest.approx(float(expected), abs=1e-5)
    table = table_of(Artifact(input_of(run.slots.policy(1))))
    assert table["ratio"].tolist() == [1.0] * 6 * len(TRAINED)
    assert table["logp_drift"].max() < 1e-6


def stored(run: Run) -> Stored:
    return Stored.read(requests.update(run, 0), advantages_of(run), ["current"])


def advantages_of(run: Run) -> Any:
    """The update's table, with the keys that it had in the update."""
    table = table_of(Artifact(input_of(run.slots.policy(1))), "advantages.parquet")
    return table.assign(key=[key_of(0, sample_id) for sample_id in table["sample_id"]])


def normal(seed: int, like: torch.Tensor) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator(CPU).manual_seed(seed), device=CPU)


def test_no_loss_and_no_gradient_depends_on_what_is_predicted_at_given_frames(run: Run):
    options = run.recipe.train.train_policy
    algorithm = plugins.load("algorithms", options.type).Algorithm(options)
    steps = TransitionDraws(stored(run), kernel(run))
    density, fine = run.recipe.policy.diffusers.density, schedule_of(base(run).scheduler, FINE_GRID)
    data = DataDraws(requests.update(run, 0), algorithm.needs.data_term, density, steps, fine)
    ids = [key_of(0, sample_id) for sample_id in sorted(tensors_of(run))]
    for draws in (steps, data):
        micro = draws(ids, 0, [0], 1.0)
        batch: Batch | Transitions = micro.batch
        given = (micro.conditioning["conditional_mask"] == 1).expand(-1, 4, -1, 2, 2)
        current, other, wrong = (normal(seed, batch.x_t) for seed in range(3))
        losses: list[torch.Tensor] = []
        for prediction in (current, current.where(~given, 9 * wrong)):
            parts = {"current": prediction.requires_grad_(), "behaviour": other}
            losses.append(algorithm.loss(parts.__getitem__, batch).per_sample)
            (gradient,) = torch.autograd.grad(losses[-1].sum(), prediction)
            assert gradient[given].count_nonzero() == 0
        assert torch.equal(losses[0], losses[1])
        assert given.flatten(1).any(1).unique().tolist() == [False, True]


@torch.no_grad()
def test_the_data_term_is_given_the_first_frames_of_its_own_items_and_leaves_them_out(run: Run):
    latents, prompts = latents_of(run), prompt_conditioning(run)
    prompt_of = dict(zip(latents.index["item_id"], latents.index["prompt_id"], strict=True))
    losses: list[float] = []
    counts: set[int] = set()
    for sample_id, (about, tensors) in tensors_of(run).items():
        noise = torch.from_numpy(seeds.normal(tuple(tensors["latents"].shape), about["seed"], "initial noise", 0))
        own = sorted(item for item, prompt_id in prompt_of.items() if prompt_id == about["prompt_id"])
        pool = own or [item for _, item in sorted((prompt_id, item) for item, prompt_id in prompt_of.items())]
        for place, index in enumerate(TRAINED):
            item = pool[seeds.generator("data item", SEED, 0, 0, key_of(0, sample_id), place).integers(len(pool))]
            count = int(seeds.generator("data given frames", SEED, 0, 0, key_of(0, sample_id), place).integers(0, 3))
            x_0, t = latents[item], kernel(run).steps[index].t
            conditioning = stack([prompts[prompt_of[item]] | given_frames(x_0[:, :count], LATENT_FRAMES)], CPU)
            x_t = ((1 - t) * x_0 + t * noise)[None]
            velocity = base(run).velocity(x_t, torch.tensor([t], dtype=torch.float32, device=CPU), conditioning)[0]
            error = (velocity - (noise - x_0))[:, count:]
            losses.append(float((t**2 + (1 - t) ** 2) * error.square().mean()))
            counts.add(count)
    assert counts == {0, 1, 2}
    metrics = table_of(Artifact(input_of(run.slots.policy(1))), "metrics.parquet")
    assert metrics["data_loss"].iloc[0] == pytest.approx(np.mean(losses), rel=1e-4)


def test_the_update_conditions_on_what_the_rollout_was_given_without_reading_the_data(run: Run):
    """The same numbers, whether it is read off the samples or drawn and encoded."""
    latents, samples = latents_of(run), tensors_of(run)
    ids = sorted(samples)
    conditioning = stored(run).condition([key_of(0, sample_id) for sample_id in ids])
    for place, sample_id in enumerate(ids):
        about = samples[sample_id][0]
        count = about["given_frames"]
        found = conditioning[CONDITIONAL_LATENTS][place]
        assert conditioning["conditional_mask"][place].flatten().tolist() == [1.0] * count + [0.0] * (3 - count)
        assert found[:, count:].count_nonzero() == 0
        assert count == 0 or torch.equal(found[:, :count], latents[about["given_item"]][:, :count])


def test_a_rollout_with_given_frames_is_made_again_with_the_same_bytes(run: Run, tmp_path: Path):
    request = requests.rollout(run, 0)
    again = make(request.model_copy(update={"slot": f"{request.slot}-again"}), tmp_path)
    assert again.content == input_of(request.slot).content
