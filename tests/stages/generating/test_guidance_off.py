"""Evaluations of models whose stock call counts guidance otherwise than recipes: at ours of 1 they are not guided."""

from pathlib import Path

import numpy as np
import pytest
import torch

from cosmos_rl_core import plugins, seeds
from cosmos_rl_core.conformance.models.families import CPU, LENGTH, SIZE, STATE, fed_to, frames_of, stock_pipeline
from cosmos_rl_core.models import _loading
from cosmos_rl_core.pipelines.spec import ModelSpec
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.formats.samples import read_unit
from tests.stages.conftest import make_evaluated_iteration, make_run
from tests.stages.small_video import LORA
from tests.stages.training.test_every_model import recipe_of

STEPS, PROMPT = 2, 'x "y" z'


def spec_of(name: str) -> ModelSpec:
    return plugins.load("models", name).SPEC


OTHERWISE = [n for n in plugins.known("models") if spec_of(n).guidance_off != 1 or spec_of(n).guidance_offset]


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("name", OTHERWISE)
def test_an_evaluation_equals_the_stock_call_at_our_guidance(name: str, scale: float, prompt_dir: str, tmp_path: Path):
    values = recipe_of(name, prompt_dir, tmp_path, LORA)
    values["policy"]["diffusers"]["sample"] |= {"guidance_scale": scale, "eval_num_steps": STEPS}
    (tmp_path / "held-out").mkdir()
    (tmp_path / "held-out/test.txt").write_text(f"{PROMPT}\n", encoding="utf-8")
    dataset = {"name": "ocr", "local_dir": str(tmp_path / "held-out"), "split": "test"}
    values["validation"] = {"n_generation": 1, "dataset": dataset}
    run = make_run(tmp_path, values)
    make_evaluated_iteration(run, tmp_path)
    (found,) = read_unit(Artifact(input_of(run.slots.version(1, "evaluate"))), 0)

    export = tmp_path / "export"
    Artifact(input_of(run.slots.version(1, "export"))).bring_to(export, 0, 1)
    stock = stock_pipeline(values["policy"]["model_name_or_path"])
    stock.load_lora_weights(export / "lora", weight_name="model.safetensors", adapter_name="default")
    seed = seeds.derive(found.row["seed"], "evaluation")

    def pictures(argument: float) -> np.ndarray:
        given = _loading.stock_arguments(stock, SIZE, frames_of(stock)) | {"guidance_scale": argument}
        output = stock(
            prompt=[found.row["prompt"]],
            num_inference_steps=STEPS,
            max_sequence_length=LENGTH,
            generator=[torch.Generator(CPU).manual_seed(seed)],
            output_type="np",
            **given,
        )
        return np.asarray(output.frames[0] if hasattr(output, "frames") else output.images[:1])

    off, spec = found.pixels.astype(float), spec_of(name)
    with fed_to(stock.transformer) as fed:
        expected = 255 * pictures(spec.guidance_off if scale == 1 else scale - spec.guidance_offset)
    assert sum(len(call[STATE]) for call in fed) == STEPS * (1 if scale == 1 else 2)
    other = 255 * pictures(spec.guidance_off + 1.5)
    assert np.abs(off - expected).max() <= 1
    assert np.abs(off - other).max() > 2
