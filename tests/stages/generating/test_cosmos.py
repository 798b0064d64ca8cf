"""Cosmos-Predict2.5 through every stage of an iteration of NFT, to the stock pipeline with what was trained."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_rl_core import seeds
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.models._loading import PREFIX
from cosmos_rl_core.models.cosmos_predict2_5 import model as cosmos_predict2_5
from flows.planning import requests
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.formats.embeddings import EMPTY, NEGATIVE, Embeddings
from stages.formats.policies import read_part
from stages.formats.samples import read_unit
from tests.stages.conftest import make, make_evaluated_iteration, make_run
from tests.stages.small_video import LORA, recipe

CPU = torch.device("cpu")
LENGTH = 200


@pytest.fixture
def values(tmp_path: Path, prompt_dir: str) -> dict[str, Any]:
    base = str(tiny_pipelines.save("cosmos_predict2_5", tmp_path / "cosmos"))
    held_out = tmp_path / "held-out"
    held_out.mkdir()
    (held_out / "test.txt").write_text('x "y" z\n', encoding="utf-8")
    values = recipe(base, prompt_dir, LORA)
    sampling = {"num_steps": 3, "guidance_scale": 3.0, "eval_num_steps": 2}
    values["policy"]["diffusers"] |= {"guardrail": "off", "max_prompt_length": LENGTH, "sample": sampling}
    dataset = {"name": "ocr", "local_dir": str(held_out), "split": "test"}
    return values | {"validation": {"n_generation": 1, "dataset": dataset}}


def test_an_iteration_trains_and_its_evaluation_is_the_stock_pipelines(values: dict[str, Any], tmp_path: Path):
    run = make_run(tmp_path, values)
    make_evaluated_iteration(run, tmp_path)

    before, after = (read_part(input_of(slot), "current") for slot in (run.slots.policy(0), run.slots.policy(1)))
    assert max(float((after[name] - before[name]).abs().max()) for name in before) > 1e-4
    path = values["policy"]["model_name_or_path"]
    model = cosmos_predict2_5.load(path, ("text", PREFIX), CPU)
    stored = Embeddings([input_of(run.prepared.embed.slot)], [NEGATIVE, EMPTY])
    for name, text in ((NEGATIVE, model.negative_prompt), (EMPTY, "")):
        (expected,) = model.encode_prompts([text], LENGTH)
        assert torch.equal(stored[name]["projected_prompt_embeds"], expected["projected_prompt_embeds"])

    # What was evaluated is the stock pipeline's own call, whose guidance of 2 is ours of 3.
    artifact = Artifact(input_of(run.slots.version(1, "evaluate")))
    (sample,) = read_unit(artifact, 0)
    pipeline: Any = cosmos_predict2_5.load_stock(path, guardrail=False, device=CPU)
    pipeline.set_progress_bar_config(disable=True)
    Artifact(input_of(run.slots.version(1, "export"))).bring_to(tmp_path / "export")
    lora = str(tmp_path / "export/lora")
    pipeline.load_lora_weights(lora, weight_name="model.safetensors", adapter_name="default")
    generator = torch.Generator(CPU).manual_seed(seeds.derive(sample.row["seed"], "evaluation"))
    frames = pipeline(
        prompt='x "y" z', height=16, width=16, num_frames=5, num_inference_steps=2, guidance_scale=2.0,
        max_sequence_length=LENGTH, generator=generator, output_type="np",
    ).frames  # fmt: skip
    difference = sample.pixels.astype(int) - np.rint(255 * frames[0]).astype(int)
    assert np.abs(difference).max() <= 1
    assert sample.pixels.std() > 1


def test_only_stages_that_show_something_to_the_guardrail_load_it(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Planned where it is installed, run where it is not: the stage fails instead of going on without."""
    del values["policy"]["diffusers"]["guardrail"]
    with monkeypatch.context() as patch:
        patch.setattr("cosmos_rl_core.pipelines.directories.check_installed", lambda *_: None)
        run = make_run(tmp_path, values)
    assert run.plan.model.guardrail == ("guardrail",)
    make(requests.policy(run), tmp_path)
    with pytest.raises(ValueError, match="pip install cosmos_guardrail"):
        make(run.prepared.embed, tmp_path)
    assert (
        make_run(tmp_path, values | {"policy": without_guardrail(values)}, "off").prepared.embed.slot
        != run.prepared.embed.slot
    )


def without_guardrail(values: dict[str, Any]) -> dict[str, Any]:
    return values["policy"] | {"diffusers": values["policy"]["diffusers"] | {"guardrail": "off"}}
