"""Stable Diffusion 3, in addition to every model's tests: lengths of prompts, and checkpoints without T5."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.conformance.models.families import LENGTH, PROMPTS, load_family, run_stock
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.pipelines import directories, sizes
from cosmos_rl_core.sampling.flow import euler
from cosmos_rl_core.sampling.rollout import sample
from cosmos_rl_core.sampling.schedule import schedule_of


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_sd3_refuses_prompts_that_the_stock_pipeline_refuses(tmp_path: Path):
    with pytest.raises(ConfigError, match="at most 512"):
        sizes.check_prompt_length(str(tiny_pipelines.save("sd3", tmp_path)), 513)


def test_sd3_without_t5_gives_zeros_in_its_place_as_the_stock_pipeline_does(tmp_path: Path):
    folder = Path(tiny_pipelines.save("sd3", tmp_path))
    change(folder / directories.INDEX, text_encoder_3=[None, None], tokenizer_3=[None, None])
    for part in ("text_encoder_3", "tokenizer_3"):
        shutil.rmtree(folder / part)
    family = load_family("sd3", str(folder))
    text = family.load("text")
    (alone,) = text.encode_prompts(PROMPTS[:1], LENGTH)
    assert all(torch.equal(alone[name], family.conditioning[name][0]) for name in alone)
    assert alone["prompt_embeds"].shape == (sizes.text_tokens(str(folder), LENGTH), 32)
    assert not alone["prompt_embeds"][-LENGTH:].any()
    assert text.transformer is None
    expected = run_stock(family.stock, family.noise, guidance_scale=3.0)
    ours = sample(family.velocity(3.0), family.noise, euler(schedule_of(family.stock.scheduler, 5))).latents
    assert (ours - expected).abs().max() < 1e-4
