"""Every model plugin with a negative prompt, against the stock pipeline's call with the same one."""

import pytest
import torch

from cosmos_rl_core.config.policy import DiffusersConfig, SampleConfig
from cosmos_rl_core.conformance.models.families import (
    PROMPTS,
    SCHEDULERS,
    TEXTS,
    Family,
    fed_to,
    kernel,
    run_stock,
)
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models._base import guided_velocity
from cosmos_rl_core.models._conditioning import stack
from cosmos_rl_core.pipelines import directories, guidance
from cosmos_rl_core.sampling.rollout import sample

NEGATIVE = "Blurry, 7 hands; low quality."


def config(text: str) -> DiffusersConfig:
    return DiffusersConfig(sample=SampleConfig(guidance_scale=3.0, negative_prompt=text))


@pytest.mark.parametrize("text", [NEGATIVE, ""])
def test_a_negative_prompt_acts_as_in_the_stock_call(family: Family, text: str, monkeypatch: pytest.MonkeyPatch):
    """The embedding has the same bits, and guidance away from it leads to the same latents."""
    if text and not directories.spec(family.folder).takes_negative:
        with pytest.raises(ConfigError, match="guides away from the empty prompt alone; leave it out"):
            guidance.check(family.folder, config(text))
        return
    guidance.check(family.folder, config(text))
    monkeypatch.setattr(family.stock, "scheduler", SCHEDULERS["euler"]())
    options = {"num_inference_steps": 2, "guidance_scale": 3.0, "negative_prompt": [text] * len(PROMPTS)}
    expected = run_stock(family.stock, family.noise, **options)
    # One prompt: encoders give other last bits in a batch of two on some CPUs.
    alone = {"prompt": PROMPTS[:1], "num_inference_steps": 1, "negative_prompt": [text]}
    with fed_to(family.stock.transformer) as fed:
        run_stock(family.stock, family.noise[:1], **options | alone)
    negative = stack([family.encode_negative(text)] * len(PROMPTS), family.device)
    rows = [row for call in fed for row in call[TEXTS]]
    assert any(torch.equal(row, negative["prompt_embeds"][0]) for row in rows)

    def velocity(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return guided_velocity(family.model, x, t, family.conditioning, negative, 3.0)

    steps = kernel(family, "euler", 2)
    ours = sample(velocity, family.noise, steps).latents
    assert (ours - expected).abs().max() < 1e-4
    if text:
        default = sample(family.velocity(3.0), family.noise, steps).latents
        assert (ours - default).abs().max() > 1e-3


def test_it_is_encoded_without_autograd_on_the_cpu(family: Family):
    encoded = family.model.encode_negative(NEGATIVE, family.length)
    assert {tensor.device.type for tensor in encoded.values()} == {"cpu"}
    assert not any(tensor.requires_grad for tensor in encoded.values())
