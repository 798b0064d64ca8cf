"""A negative prompt of the recipe's own: what is embedded, what rollouts and evaluations make of it."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import SanaPipeline
from safetensors.torch import load

from cosmos_rl_core import seeds
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.errors import ConfigError
from flows.planning import requests
from flows.planning.run import Run
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.formats import embeddings
from stages.formats.samples import read_unit
from tests.stages.conftest import make, make_run
from tests.stages.small_video import LORA, recipe

CPU = torch.device("cpu")
NEGATIVE, PROMPT, LENGTH = "Blurry; 7 hands.", 'x "y" z', 10


def run_with(base: str, prompt_dir: str, tmp_path: Path, **sample: Any) -> Run:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "test.txt").write_text(f"{PROMPT}\n", encoding="utf-8")
    values = recipe(base, prompt_dir, LORA)
    values["policy"]["diffusers"] |= {"inference_size": [32, 32], "train_frames": 1, "max_prompt_length": LENGTH}
    values["policy"]["diffusers"]["sample"] |= {"eval_num_steps": 2, "guidance_scale": 3.0} | sample
    dataset = {"name": "ocr", "local_dir": str(tmp_path), "split": "test"}
    return make_run(tmp_path, values | {"validation": {"n_generation": 1, "dataset": dataset}})


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    return str(tiny_pipelines.save("sana", tmp_path_factory.mktemp("base") / "sana"))


@pytest.fixture(scope="module")
def stock(base: str) -> Any:
    pipeline: Any = SanaPipeline.from_pretrained(base, use_safetensors=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def first_latents(run: Run) -> torch.Tensor:
    artifact = Artifact(input_of(run.slots.iteration(0, "rollout")))
    (first, *_) = read_unit(artifact, 0, contracts.TENSORS)
    assert first.tensors is not None
    return load(first.tensors)["latents"]


def test_a_negative_prompt_is_embedded_once_and_steers_rollouts_and_evaluations(
    base: str, stock: Any, prompt_dir: str, tmp_path: Path
):
    run = run_with(base, prompt_dir, tmp_path / "own", negative_prompt=NEGATIVE)
    for request in (
        partial(requests.policy, run),
        lambda: run.prepared.embed,
        partial(requests.rollout, run, 0),
        partial(requests.export, run, 0),
        partial(requests.evaluate, run, 0),
    ):
        make(request(), tmp_path)
    stored = embeddings.Embeddings([input_of(run.prepared.embed.slot)], [embeddings.NEGATIVE, embeddings.EMPTY])
    for name, text in ((embeddings.NEGATIVE, NEGATIVE), (embeddings.EMPTY, "")):
        expected = stock.encode_prompt(PROMPT, negative_prompt=text, max_sequence_length=LENGTH, device=CPU)[2:]
        embeds, mask = (value[0] for value in expected)
        found = stored[name]
        assert torch.equal(found["prompt_attention_mask"], mask)
        assert torch.equal(found["prompt_embeds"][mask.bool()], embeds[mask.bool()])

    other = run_with(base, prompt_dir, tmp_path / "other")
    for request in (partial(requests.policy, other), lambda: other.prepared.embed, partial(requests.rollout, other, 0)):
        make(request(), tmp_path)
    assert (first_latents(run) - first_latents(other)).abs().max() > 1e-3

    # Version 0 is the base model.
    artifact = Artifact(input_of(run.slots.version(0, "evaluate")))
    (sample,) = read_unit(artifact, 0)
    images: list[np.ndarray] = []
    for options in ({"negative_prompt": NEGATIVE}, {}):
        generator = torch.Generator(CPU).manual_seed(seeds.derive(sample.row["seed"], "evaluation"))
        made = stock(
            prompt=PROMPT, height=32, width=32, num_inference_steps=2, guidance_scale=3.0, max_sequence_length=LENGTH,
            generator=generator, output_type="np", use_resolution_binning=False, **options,
        )  # fmt: skip
        images.append(np.rint(255 * made.images[0]).astype(int))
    assert np.abs(sample.pixels[0].astype(int) - images[0]).max() <= 1
    assert np.abs(images[1] - images[0]).max() > 1


def test_an_unset_negative_prompt_is_the_stock_calls_and_changes_no_identity(
    base: str, prompt_dir: str, tmp_path: Path
):
    absent, own, empty = (
        run_with(base, prompt_dir, tmp_path / name, **options)
        for name, options in (("a", {}), ("b", {"negative_prompt": NEGATIVE}), ("c", {"negative_prompt": ""}))
    )
    assert absent.prepared.embed.config.identity()["negative_prompt"] is None
    assert (
        absent.prepared.embed.config.identity() | {"negative_prompt": NEGATIVE} == own.prepared.embed.config.identity()
    )
    assert absent.recipe.identity()["policy"]["diffusers"]["sample"]["negative_prompt"] is None
    assert len({run.prepared.embed.fingerprint for run in (absent, own, empty)}) == 3


def test_a_negative_prompt_without_guidance_is_refused(base: str, prompt_dir: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"negative_prompt = 'x' has no effect at guidance_scale = 1; raise "):
        run_with(base, prompt_dir, tmp_path / "run", negative_prompt="x", guidance_scale=1.0)
