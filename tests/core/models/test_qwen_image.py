"""The guidance of Qwen-Image, in addition to every model's tests: it keeps the norm of each token."""

import json
from pathlib import Path

import pytest
import torch

from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.conformance.models.adapters import load_model
from cosmos_rl_core.conformance.models.families import CPU
from cosmos_rl_core.errors import ConfigError


def test_guidance_turns_each_token_and_leaves_its_norm(tmp_path: Path):
    """A token is a square of 2 x 2 latents with all their channels."""
    model = load_model(tiny_pipelines.save("qwen_image", tmp_path), (), CPU)
    generator = torch.Generator(CPU).manual_seed(0)
    conditional, other = (torch.randn(2, 4, 4, 6, generator=generator, device=CPU) for _ in range(2))
    found, plain = model.guide(conditional, other, 3.0), other + 3 * (conditional - other)
    assert found.shape == conditional.shape
    for row in range(0, 4, 2):
        for column in range(0, 6, 2):
            square = (slice(None), slice(None), slice(row, row + 2), slice(column, column + 2))
            ours, expected, kept = (some[square].flatten(1) for some in (found, plain, conditional))
            scaled = expected * (kept.norm(dim=1) / expected.norm(dim=1))[:, None]
            torch.testing.assert_close(ours, scaled, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("setting", "reason"), [("guidance_embeds", "a distilled model"), ("zero_cond_t", "an editing model")]
)
def test_checkpoints_of_other_models_are_refused(setting: str, reason: str, tmp_path: Path):
    folder = tiny_pipelines.save("qwen_image", tmp_path)
    file = folder / "transformer/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {setting: True}))
    with pytest.raises(ConfigError, match=f"{setting} = True, so it is .*{reason}"):
        load_model(folder, (), CPU)
