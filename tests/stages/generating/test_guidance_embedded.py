"""The guidance that a distilled transformer takes as an input: one for samples, one for losses on media."""

from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.models.flux.model import Flux
from flows.planning import requests
from flows.planning.run import Run
from tests.hand_made import rewards
from tests.stages.conftest import make, make_run

MEDIA = {"name": "rendered_text", "num_items": 8, "size": [32, 64]}


def values_of(model: str, train_policy: dict[str, Any], **diffusers: Any) -> dict[str, Any]:
    """Two samples of two prompts, or two supervised steps; losses on held-out media."""
    sft = train_policy["type"] == "sft"
    sizes = {"inference_size": [32, 64], "max_prompt_length": 12} | diffusers
    sample: dict[str, Any] = {} if sft else {"num_steps": 3, "solver": "flow_sde"}
    return {
        "policy": {
            "model_name_or_path": model,
            "diffusers": sizes | {"sample": sample},
            "lora": {"r": 2, "target_modules": ["to_q"]},
        },
        "train": {"num_iterations": 1, "train_batch_per_replica": 4, "train_policy": train_policy},
        "rollout": {} if sft else {"n_generation": 2, "n_generation_mini_batch": 2},
        "rewards": [] if sft else [{"fn": {"name": "jpeg"}}],
        "validation": {"data": MEDIA | {"split": "test"}},
    }


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, float]]:
    """Whether each forward pass has a gradient, and its guidance."""
    found, velocity = list[tuple[bool, float]](), Flux.velocity

    def told(self: Flux, *arguments: Any) -> Any:
        made = velocity(self, *arguments)
        found.append((made.requires_grad, self.embedded_guidance_scale))
        return made

    monkeypatch.setattr(Flux, "velocity", told)
    return found


def prepared(run: Run, tmp_path: Path) -> None:
    make(requests.policy(run), tmp_path)
    for data in (run.prepared.data, run.prepared.held_out):
        for request in (*data.embeds, *data.encodes):
            make(request, tmp_path)
    make(run.prepared.embed, tmp_path)


def test_supervised_training_and_held_out_losses_embed_a_guidance_scale_of_1(
    tmp_path: Path, asked: list[tuple[bool, float]]
):
    model = str(tiny_pipelines.save("flux", tmp_path / "flux"))
    run = make_run(tmp_path, values_of(model, {"type": "sft", "steps_per_iteration": 1, "dataset": MEDIA}))
    prepared(run, tmp_path)
    make(requests.finetune(run, 0), tmp_path)
    make(requests.validate(run, 0), tmp_path)
    assert {scale for _, scale in asked} == {1.0}
    before = values_of(model, {"type": "sft", "dataset": MEDIA}, supervised_guidance_scale=3.5)
    assert make_run(tmp_path, before, "before").plan.supervised == run.plan.sampled


def test_a_loss_on_media_has_its_own_guidance_and_samples_keep_theirs(tmp_path: Path, asked: list[tuple[bool, float]]):
    model = str(tiny_pipelines.save("flux", tmp_path / "flux"))
    ddrl = {"type": "ddrl", "train_on": [1], "dataset": {"name": "mock", "num_prompts": 2}, "data": MEDIA}
    run = make_run(tmp_path, values_of(model, ddrl))
    prepared(run, tmp_path)
    make(requests.rollout(run, 0), tmp_path)
    assert {scale for _, scale in asked} == {3.5}
    for request in rewards(run, run.slots.iteration(0, "rollout"), 0):
        make(request, tmp_path)
    asked.clear()
    make(requests.update(run, 0), tmp_path)
    assert {scale for trains, scale in asked if trains} == {1.0, 3.5}
    assert {scale for trains, scale in asked if not trains} == {3.5}
