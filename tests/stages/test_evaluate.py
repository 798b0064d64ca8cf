"""Evaluations in half precision: the stock pipelines' own pictures, from half the memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.conformance.models.adapters import load_model
from cosmos_rl_core.conformance.models.families import (
    CPU,
    LENGTH,
    OF_TEXT,
    PROMPTS,
    SIZE,
    frames_of,
    moved,
    tensors_of,
    write_files,
)
from cosmos_rl_core.models import _loading
from cosmos_rl_core.parallel.precision import ParamDtype, computes_in, keep_float32
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.pipelines.memory import in_half, is_matrix
from cosmos_rl_core.weights.export import full_pipeline, lora_files
from cosmos_rl_core.weights.lora_layers import adapt
from cosmos_rl_core.weights.parts import CURRENT
from cosmos_rl_core.weights.policy_weights import prepare
from cosmos_rl_core.weights.shapes import trainable_shapes, weight_shapes
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.contracts import ModelRef
from stages.formats.samples import read_samples
from stages.training.loading import load_stock
from tests.stages.conftest import make_evaluated_iteration, make_run
from tests.stages.small_video import recipe

OF_QUERIES = {"r": 2, "lora_alpha": 4.0, "target_modules": ["to_q"]}
LORA = LoraConfig(r=4, lora_alpha=12.0)
LEVELS = 2.5
"""Of 255: how far off pictures may be, as the root of the mean square."""


def pictures(pipeline: Any) -> np.ndarray:
    """With noise of the pipeline's own, as `evaluate` has it draw it; as 256 levels."""
    pipeline.set_progress_bar_config(disable=True)
    generators = [torch.Generator(CPU).manual_seed(seed) for seed in range(len(PROMPTS))]
    sizes = _loading.stock_arguments(pipeline, SIZE, frames_of(pipeline))
    output = pipeline(
        prompt=[*PROMPTS], num_inference_steps=2, guidance_scale=3.0, max_sequence_length=LENGTH, generator=generators,
        output_type="np", **sizes,
    )  # fmt: skip
    return 255 * np.asarray(output.frames if hasattr(output, "frames") else output.images)


def autocast(transformer: nn.Module) -> None:
    """Have a float32 transformer compute as in rollouts."""
    keep_float32(transformer)
    forward = transformer.forward

    def computed(*arguments: Any, **named: Any) -> Any:
        with computes_in("bfloat16", CPU):
            return tree_map(torch.Tensor.float, forward(*arguments, **named))

    transformer.forward = computed


@pytest.fixture(params=OF_TEXT)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> ModelRef:
    """A base model of each family."""
    path = str(tiny_pipelines.save(request.param, tmp_path / "base"))
    return ModelRef(path=path, adapter=request.param, digest="")


def export_of(model: ModelRef, lora: LoraConfig | None, folder: Path) -> str:
    """Weights that moved, in ``folder``; the directory of the pipeline that they go with."""
    transformer = load_model(model.path, ("transformer",), CPU).transformer
    weights = prepare(transformer, lora, reference=False)
    tensors = moved(tensors_of(weights, CURRENT), 0.2 if lora else 0.05)
    write_files(lora_files(tensors, lora) if lora else full_pipeline(model.path, tensors), folder)
    return model.path if lora else str(folder)


@pytest.mark.parametrize("lora", [LORA, pytest.param(None, marks=pytest.mark.slow)], ids=["lora", "full"])
def test_pictures_in_bfloat16_are_close_to_float32(
    model: ModelRef, lora: LoraConfig | None, tmp_path: Path, record_property
):
    path = export_of(model, lora, tmp_path / "export")

    def loaded(param_dtype: ParamDtype) -> Any:
        pipeline = load_stock(model, path, param_dtype, CPU)
        if lora:
            folder = tmp_path / "export/lora"
            pipeline.load_lora_weights(folder, weight_name="model.safetensors", adapter_name="default")
            adapt(pipeline.transformer)
        return pipeline

    whole, halved = loaded("float32"), loaded("bfloat16")
    expected, found = pictures(whole), pictures(halved)
    drift = float(np.sqrt(np.square(found - expected).mean()))
    record_property("drift", drift)
    # Of packed tokens, bfloat16 is up to three times as far off (Family.half_factor).
    assert drift < LEVELS * (3 if directories.spec(path).packing > 1 else 1)
    assert expected.std() > 3
    assert drift > 0
    # They are computed by autocast with float32 weights, which rollouts are made by, to the bit.
    autocast(whole.transformer)
    assert np.array_equal(found, pictures(whole))

    held, shapes = halved.transformer.state_dict(), weight_shapes(path)
    adapters = trainable_shapes(shapes, lora) if lora else {}
    planned = sum(in_half(each, directories.spec(path).float32_modules) for each in (shapes, adapters))
    assert sum(tensor.nbytes for tensor in held.values()) == planned
    for name, component in halved.components.items():
        for key, tensor in component.named_parameters() if isinstance(component, nn.Module) else ():
            plain = key.replace(".base_layer.", ".")
            # Wan's embedding of the timestep is float32 in the stock half-precision pipeline too.
            halved_too = (
                name == "transformer" and is_matrix(plain, tuple(tensor.shape)) and "time_embedder" not in plain
            )
            if ".lora_" not in key:
                assert tensor.dtype == (torch.bfloat16 if halved_too else torch.float32), (name, key)


@pytest.mark.parametrize("family", ["wan", "sana_video"])
def test_a_video_model_is_evaluated_on_pictures(family: str, tmp_path: Path, prompt_dir: str):
    values = recipe(str(tiny_pipelines.save(family, tmp_path / family)), prompt_dir, OF_QUERIES)
    sample = {"num_steps": 2, "eval_num_steps": 2}
    values["policy"]["diffusers"] |= {"train_frames": 1, "inference_size": [64, 64], "sample": sample}
    (tmp_path / "held-out").mkdir()
    (tmp_path / "held-out/test.txt").write_text('x "y" z\n', encoding="utf-8")
    dataset = {"name": "ocr", "local_dir": str(tmp_path / "held-out"), "split": "test"}
    run = make_run(tmp_path, values | {"validation": {"n_generation": 1, "dataset": dataset}})
    make_evaluated_iteration(run, tmp_path)
    found = [sample.pixels for sample in read_samples(Artifact(input_of(run.slots.version(1, "evaluate"))))]
    assert {picture.shape for picture in found} == {(1, 64, 64, 3)}
    assert all(picture.std() > 1 for picture in found)
