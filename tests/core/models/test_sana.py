"""SANA and SANA-Video, in addition to every model's tests: kinds of checkpoints, instructions, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.conformance.models.adapters import load_model
from cosmos_rl_core.conformance.models.families import CPU, SCHEDULERS, load_family, run_stock
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.sampling.flow import euler
from cosmos_rl_core.sampling.rollout import sample
from cosmos_rl_core.sampling.schedule import schedule_of


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def load(folder: Path | str, *components: str) -> Any:
    return load_model(folder, components, CPU)


# Of SANA's checkpoints some predict a variance besides, some scale the time, and large ones have positions.
@pytest.mark.parametrize(
    ("name", "transformer"),
    [
        ("sana", {"out_channels": 8}),
        ("sana", {"timestep_scale": 0.001}),
        ("sana", {"interpolation_scale": 1}),
        ("sana", {"qk_norm": None}),
        ("sana_video", {"out_channels": 8}),
    ],
)
def test_every_kind_of_sana_checkpoint_samples_as_the_stock_pipeline(
    name: str, transformer: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    family = load_family(name, str(tiny_pipelines.save(name, tmp_path, **transformer)))
    monkeypatch.setattr(family.stock, "scheduler", SCHEDULERS["euler"]())
    expected = run_stock(family.stock, family.noise, guidance_scale=3.0)
    ours = sample(family.velocity(3.0), family.noise, euler(schedule_of(family.stock.scheduler, 5))).latents
    assert (ours - expected).abs().max() < 1e-4
    assert (ours - family.noise).abs().max() > 0.1


def test_sana_puts_the_stock_instruction_before_prompts_and_keeps_the_prompts_end(tmp_path: Path):
    """The first and the last of the instruction's embeddings are kept, so that it takes no room from the prompt."""
    model = load(tiny_pipelines.save("sana", tmp_path), "text")
    short, cut = model.encode_prompts(["ab", "a" * 50], 10)
    empty = model.encode_negative("", 10)
    assert [int(c["prompt_attention_mask"].sum()) for c in (short, cut, empty)] == [4, 10, 1]
    assert {tuple(c["prompt_embeds"].shape) for c in (short, cut, empty)} == {(10, 16)}
    assert torch.equal(short["prompt_embeds"][0], cut["prompt_embeds"][0])


@pytest.mark.parametrize("name", ["sana", "sana_video"])
def test_another_instruction_of_sana_is_the_stock_pipelines_argument(name: str, tmp_path: Path):
    folder = tiny_pipelines.save(name, tmp_path)
    model, stock = load(folder, "text"), DiffusionPipeline.from_pretrained(folder, use_safetensors=True)
    (default,) = model.encode_prompts(["ab"], 10)
    for instruction in (["Make it bright.", "Prompt: "], []):
        model.complex_human_instruction = instruction
        own, empty = model.encode_prompts(["ab", ""], 10)
        for ours, text in ((own, "ab"), (empty, "")):
            embeds, mask, negative, negative_mask = stock.encode_prompt(
                text, negative_prompt="no", max_sequence_length=10, complex_human_instruction=instruction, device=CPU
            )
            assert torch.equal(ours["prompt_embeds"], embeds[0])
            assert torch.equal(ours["prompt_attention_mask"], mask[0])
            steered = model.encode_negative("no", 10)
            assert torch.equal(steered["prompt_embeds"], negative[0])
            assert torch.equal(steered["prompt_attention_mask"], negative_mask[0])
        assert (own["prompt_embeds"] - default["prompt_embeds"]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["sana", "sana_video"])
def test_sana_models_with_guidance_as_an_input_or_with_another_vae_are_refused(name: str, tmp_path: Path):
    folder = tiny_pipelines.save(name, tmp_path, guidance_embeds=True)
    with pytest.raises(ConfigError, match=r"has guidance_embeds = True, so it is .*a distilled model"):
        load(folder)
    change(folder / "vae/config.json", _class_name="AutoencoderKL")
    with pytest.raises(ConfigError, match=r"AutoencoderKL; supported here: Autoencoder(DC|KLWan, .*LTX2Video)$"):
        load(folder)
