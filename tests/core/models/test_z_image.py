"""Z-Image, in addition to every model's tests: options of guidance, texts, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_rl_core.config.policy import DiffusersConfig, SampleConfig
from cosmos_rl_core.config.shared import ModelRef
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.conformance.models.families import LENGTH, PROMPTS, SCHEDULERS, Family, family_of, kernel, run_stock
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models._base import guided_velocity
from cosmos_rl_core.models._conditioning import Conditioning, stack
from cosmos_rl_core.models.z_image import SPEC
from cosmos_rl_core.pipelines import checkpoints, guidance, sizes
from cosmos_rl_core.sampling.rollout import sample

NEGATIVE = "x" * 70
"""Padded to 96 tokens, where :data:`PROMPTS` are padded to 64: positions of the image move."""
SCALE, STEPS = 3.0, 4


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return family_of("z_image", tmp_path_factory.mktemp("z"))


def both(family: Family, monkeypatch: pytest.MonkeyPatch, **options: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents of ours and of the stock pipeline, guided away from a longer text."""
    monkeypatch.setattr(family.stock, "scheduler", SCHEDULERS["euler"]())
    for name, value in options.items():
        monkeypatch.setattr(family.model, name, value)
    negative = stack([family.model.encode_negative(NEGATIVE, LENGTH)] * len(PROMPTS), family.device)

    def velocity(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return guided_velocity(family.model, x, t, family.conditioning, negative, SCALE)

    ours = sample(velocity, family.noise, kernel(family, "euler", STEPS)).latents
    told: dict[str, Any] = {"negative_prompt": [NEGATIVE] * len(PROMPTS), "guidance_scale": SCALE}
    return ours, run_stock(family.stock, family.noise, num_inference_steps=STEPS, **told, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cfg_normalization": 0.5},
        {"cfg_normalization": 1.0},
        {"cfg_truncation": 0.2},
        {"cfg_truncation": 1.5},
        {"cfg_normalization": 0.7, "cfg_truncation": 0.3},
    ],
)
def test_guidance_is_the_stock_calls_with_the_same_options(
    family: Family, options: dict[str, float], monkeypatch: pytest.MonkeyPatch
):
    ours, expected = both(family, monkeypatch, **options)
    assert (ours - expected).abs().max() < 1e-4
    plain, _ = both(family, monkeypatch, cfg_normalization=0.0, cfg_truncation=1.0)
    assert ((ours - plain).abs().max() > 1e-3) == (options not in ({}, {"cfg_truncation": 1.5}))


def test_guidance_ends_where_the_stock_pipelines_does_to_the_step(family: Family, monkeypatch: pytest.MonkeyPatch):
    """At the very time of a step it still guides."""
    monkeypatch.setattr(family.stock, "scheduler", SCHEDULERS["euler"]())
    t = torch.tensor([step.t for step in kernel(family, "euler", STEPS).steps], dtype=torch.float32)
    fed = ((1000 - 1000 * t) / 1000).tolist()
    for index, limit in enumerate(fed):
        monkeypatch.setattr(family.model, "cfg_truncation", limit)
        off = family.model.unguided(t)
        assert off is not None
        assert off.tolist() == [later > index for later in range(STEPS)]


def test_a_transformer_with_siglip_is_refused(family: Family, tmp_path: Path):
    folder = tmp_path / "omni"
    shutil.copytree(family.folder, folder)
    file = folder / "transformer/config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | {"siglip_feat_dim": 16}))
    with pytest.raises(ConfigError, match=r"siglip_feat_dim = 16, so it is an Omni model, .*; that is not supported"):
        checkpoints.check(str(folder))


def test_texts_beyond_the_positions_are_refused(family: Family):
    """1024 positions: of no token, of a text padded to 992, and of the image."""
    sizes.check_prompt_length(family.folder, 992)
    with pytest.raises(ConfigError, match="max_prompt_length is at most 992"):
        sizes.check_prompt_length(family.folder, 993)
    embeds = torch.zeros(1, 992, 16)
    t = torch.full((1,), 0.5)
    assert family.model.velocity(family.noise[:1], t, Conditioning({"prompt_embeds": embeds})).isfinite().all()
    with pytest.raises(IndexError):
        family.model.velocity(family.noise[:1], t, Conditioning({"prompt_embeds": torch.zeros(1, 1024, 16)}))


def config(scale: float, **options: float) -> DiffusersConfig:
    return DiffusersConfig(sample=SampleConfig(guidance_scale=scale), **options)  # pyright: ignore[reportArgumentType]


def test_options_of_guidance_reach_the_stock_call_and_are_refused_without_effect(family: Family, tmp_path: Path):
    guidance.check(family.folder, config(3.0, cfg_truncation=0.5))
    guidance.check(family.folder, config(1.0))
    with pytest.raises(ConfigError, match=r"cfg_truncation = 0.5 has no effect at guidance_scale = 1"):
        guidance.check(family.folder, config(1.0, cfg_truncation=0.5))
    other = str(tiny_pipelines.save("sd3", tmp_path / "sd3"))
    with pytest.raises(ConfigError, match="cfg_normalization = 1: StableDiffusion3Pipeline has no such setting"):
        guidance.check(other, config(3.0, cfg_normalization=1.0))
    ref = ModelRef(path=family.folder, adapter="z_image", digest="")
    assert guidance.stock_options(SPEC, ref) == {}
    assert guidance.stock_options(SPEC, ref.model_copy(update={"cfg_truncation": 0.5})) == {"cfg_truncation": 0.5}
    assert not any(name.startswith("cfg_") for name in ref.identity())
