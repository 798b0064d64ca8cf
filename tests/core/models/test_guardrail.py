"""The guardrail of a model that has one: asked for, refused, applied, or left out by name; never skipped in silence."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.cosmos import pipeline_cosmos2_5_predict

from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models._loading import COMPONENTS
from cosmos_rl_core.models.cosmos_predict2_5 import model as cosmos_predict2_5
from cosmos_rl_core.pipelines import directories

CPU = torch.device("cpu")
PROMPT = "a red cube, 3 balls."
LENGTH = 200


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return str(tiny_pipelines.save("cosmos_predict2_5", tmp_path_factory.mktemp("guardrail") / "base"))


@pytest.fixture(scope="session")
def latents():
    return torch.from_numpy(np.random.default_rng(1).standard_normal((1, 4, 3, 4, 4), np.float32))


def run_stock(pipeline: Any, prompt: str, latents: torch.Tensor) -> np.ndarray:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        prompt=prompt, latents=latents, num_inference_steps=2, height=32, width=32, num_frames=9,
        max_sequence_length=LENGTH, output_type="np", return_dict=False,
    )[0]  # fmt: skip


class Guardrail:
    """Takes the place of cosmos_guardrail's checker: refuses a word and blacks out a corner."""

    def to(self, device: torch.device) -> None:
        self.device = device

    def check_text_safety(self, prompt: str) -> bool:
        return prompt != "" and "bomb" not in prompt

    def check_video_safety(self, frames: np.ndarray) -> np.ndarray | None:
        if frames.mean() > 250:
            return None
        return np.where(np.indices(frames.shape)[1] < 2, np.uint8(0), frames)


@pytest.fixture
def installed(monkeypatch):
    """As if cosmos_guardrail were installed: what diffusers and the import system know of it."""
    monkeypatch.setattr(pipeline_cosmos2_5_predict, "CosmosSafetyChecker", Guardrail)
    find_spec = importlib.util.find_spec

    def found(name: str, *package: str) -> Any:
        return SimpleNamespace(name=name) if name == "cosmos_guardrail" else find_spec(name, *package)

    monkeypatch.setattr("importlib.util.find_spec", found)


def test_a_guardrail_that_is_not_installed_is_an_error_and_never_skipped(folder):
    with pytest.raises(ConfigError, match="pip install cosmos_guardrail"):
        cosmos_predict2_5.load(folder, ("text", "guardrail"), CPU)
    with pytest.raises(ConfigError, match="pip install cosmos_guardrail"):
        cosmos_predict2_5.load_stock(folder, guardrail=True, device=CPU)


@pytest.mark.usefixtures("installed")
def test_the_guardrail_refuses_prompts_and_changes_videos(folder, latents):
    model = cosmos_predict2_5.load(folder, COMPONENTS, CPU)
    guarded = cosmos_predict2_5.load(folder, (*COMPONENTS, "guardrail"), CPU)
    texts = [PROMPT, ""]
    found, expected = guarded.encode_prompts(texts, LENGTH), model.encode_prompts(texts, LENGTH)
    assert all(torch.equal(a["prompt_embeds"], b["prompt_embeds"]) for a, b in zip(found, expected, strict=True))
    with pytest.raises(ConfigError, match=r"refuses 1 prompts.*a bomb"):
        guarded.encode_prompts([PROMPT, "a bomb"], LENGTH)
    # As in the stock pipeline, which shows it prompts alone.
    steered = (each.encode_negative("a bomb", LENGTH)["prompt_embeds"] for each in (guarded, model))
    assert torch.equal(*steered)
    free = model.decode(latents)
    assert torch.equal(guarded.decode(latents), free)
    (frames,) = free.numpy()
    shown = guarded.screen(frames)
    assert shown is not None
    assert np.count_nonzero(shown[:, :2]) == 0
    assert np.array_equal(shown[:, 2:], frames[:, 2:])
    assert model.screen(frames) is frames
    assert guarded.screen(np.full((1, 4, 4, 3), 255, np.uint8)) is None


@pytest.mark.usefixtures("installed")
def test_the_stock_pipeline_has_the_guardrail_that_is_asked_for(folder, latents):
    guarded, free = (cosmos_predict2_5.load_stock(folder, guardrail=asked, device=CPU) for asked in (True, False))
    with pytest.raises(ValueError, match="detected unsafe text"):
        run_stock(guarded, "a bomb", latents)
    assert run_stock(free, "a bomb", latents).shape == (1, 9, 32, 32, 3)
    checked, unchecked = (run_stock(pipeline, PROMPT, latents) for pipeline in (guarded, free))
    assert checked[:, :, :2].max() == 0
    assert np.abs(checked[:, :, 2:] - unchecked[:, :, 2:]).max() < 2 / 255


def test_guardrail_off_never_loads_one_even_if_the_directory_names_it(folder, tmp_path, latents, monkeypatch):
    def refuse(*_: Any) -> None:
        raise AssertionError("the guardrail was made")

    monkeypatch.setattr(pipeline_cosmos2_5_predict, "CosmosSafetyChecker", refuse)
    named = tmp_path / "named"
    named.mkdir()
    for part in Path(folder).iterdir():
        (named / part.name).symlink_to(part)
    index = json.loads((named / "model_index.json").read_text())
    (named / "model_index.json").unlink()
    index["safety_checker"] = ["cosmos_guardrail", "CosmosSafetyChecker"]
    (named / "model_index.json").write_text(json.dumps(index))
    model = cosmos_predict2_5.load(str(named), COMPONENTS, CPU)
    assert torch.equal(model.decode(latents), cosmos_predict2_5.load(folder, COMPONENTS, CPU).decode(latents))


def test_a_model_without_a_guardrail_takes_no_setting(tmp_path):
    folder = tiny_pipelines.save("wan", tmp_path / "wan")
    assert directories.spec(folder).guardrail_package is None
    directories.check_guardrail(folder, None)
    for setting in ("required", "off"):
        with pytest.raises(ConfigError, match=f'guardrail = "{setting}": WanPipeline has no guardrail'):
            directories.check_guardrail(folder, setting)


def test_guardrail_required_is_the_default_and_says_what_to_install(folder, monkeypatch):
    assert directories.spec(folder).guardrail_package == "cosmos_guardrail"
    directories.check_guardrail(folder, "off")
    to_do = "needs the package cosmos_guardrail: pip install cosmos_guardrail or set it to"
    with pytest.raises(ConfigError, match=f"guardrail, .required. unless it is set, {to_do}"):
        directories.check_guardrail(folder, None)
    with pytest.raises(ConfigError, match=f"guardrail = .required. {to_do}"):
        directories.check_guardrail(folder, "required")
    find_spec = importlib.util.find_spec

    def found(name: str, *package: str) -> Any:
        return SimpleNamespace(name=name) if name == "cosmos_guardrail" else find_spec(name, *package)

    monkeypatch.setattr("importlib.util.find_spec", found)
    directories.check_guardrail(folder, "required")
    directories.check_guardrail(folder, None)
