"""SANA's prompts after an instruction of the recipe's own: what is embedded, and what is evaluated."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import SanaPipeline

from cosmos_rl_core import seeds
from cosmos_rl_core.canonical import digest
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.errors import ConfigError
from flows.planning import requests
from flows.planning.run import Run
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.formats.embeddings import Embeddings
from stages.formats.samples import read_unit
from tests.stages.conftest import make, make_run
from tests.stages.small_video import LORA, recipe

CPU = torch.device("cpu")
INSTRUCTION = ["Make it bright.", "Prompt: "]
LENGTH = 10
PROMPT = 'x "y" z'


def run_with(instruction: list[str] | None, base: str, prompt_dir: str, tmp_path: Path) -> Run:
    held_out = tmp_path / "held-out"
    held_out.mkdir(exist_ok=True)
    (held_out / "test.txt").write_text(f"{PROMPT}\n", encoding="utf-8")
    values = recipe(base, prompt_dir, LORA)
    values["policy"]["diffusers"] |= {"inference_size": [32, 32], "train_frames": 1, "max_prompt_length": LENGTH}
    values["policy"]["diffusers"]["sample"]["eval_num_steps"] = 2
    if instruction is not None:
        values["policy"]["diffusers"]["complex_human_instruction"] = instruction
    dataset = {"name": "ocr", "local_dir": str(held_out), "split": "test"}
    return make_run(tmp_path, values | {"validation": {"n_generation": 1, "dataset": dataset}})


def test_embeddings_and_evaluations_equal_the_stock_pipelines_with_an_instruction(prompt_dir: str, tmp_path: Path):
    base = str(tiny_pipelines.save("sana", tmp_path / "sana"))
    run = run_with(INSTRUCTION, base, prompt_dir, tmp_path)
    for request in (
        partial(requests.policy, run),
        lambda: run.prepared.embed,
        partial(requests.export, run, 0),
        partial(requests.evaluate, run, 0),
    ):
        make(request(), tmp_path)
    pipeline: Any = SanaPipeline.from_pretrained(base, use_safetensors=True)
    pipeline.set_progress_bar_config(disable=True)
    prompt = run.plan.prompts[0]
    expected = pipeline.encode_prompt(
        prompt.text, max_sequence_length=LENGTH, complex_human_instruction=INSTRUCTION, device=CPU
    )
    stored = Embeddings([input_of(run.prepared.embed.slot)], [prompt.id])[prompt.id]
    mask = expected[1][0]
    assert torch.equal(stored["prompt_attention_mask"], mask)
    assert torch.equal(stored["prompt_embeds"][mask.bool()], expected[0][0][mask.bool()])

    # Version 0 is the base model.
    artifact = Artifact(input_of(run.slots.version(0, "evaluate")))
    (sample,) = read_unit(artifact, 0)
    images: list[np.ndarray] = []
    for options in ({"complex_human_instruction": INSTRUCTION}, {}):
        generator = torch.Generator(CPU).manual_seed(seeds.derive(sample.row["seed"], "evaluation"))
        made = pipeline(
            prompt=PROMPT, height=32, width=32, num_inference_steps=2, guidance_scale=2.0, max_sequence_length=LENGTH,
            generator=generator, output_type="np", use_resolution_binning=False, **options,
        )  # fmt: skip
        images.append(np.rint(255 * made.images[0]).astype(int))
    assert np.abs(sample.pixels[0].astype(int) - images[0]).max() <= 1
    assert np.abs(images[1] - images[0]).max() > 1


def test_an_empty_an_absent_and_an_own_instruction_embed_differently(prompt_dir: str, tmp_path: Path):
    base = str(tiny_pipelines.save("sana", tmp_path / "sana"))
    given = {"absent": None, "none": [], "own": INSTRUCTION}
    for folder in given:
        (tmp_path / folder).mkdir()
    runs = [run_with(given[folder], base, prompt_dir, tmp_path / folder) for folder in given]
    assert runs[0].plan.model.identity()["complex_human_instruction"] is None
    assert len({digest(run.prepared.embed.config.identity()) for run in runs}) == 3


def test_models_without_an_instruction_refuse_one(wan_path: str, prompt_dir: str, tmp_path: Path):
    with pytest.raises(ConfigError, match="complex_human_instruction: WanPipeline puts no instruction before prompts"):
        run_with([], wan_path, prompt_dir, tmp_path)
