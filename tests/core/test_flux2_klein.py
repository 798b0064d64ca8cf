"""FLUX.2 klein beside what every model is tested for: its shift, its latents, and distilled models."""

from pathlib import Path

import pytest
import torch
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

from cosmos_rl_core.config.policy import DiffusersConfig, SampleConfig
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models.flux2_klein import SPEC
from cosmos_rl_core.pipelines import guidance, sizes
from cosmos_rl_core.sampling.rollout import sample
from tests import tiny_pipelines
from tests.families import CPU, SIZE, Family, kernel, load_family, run_stock


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tiny_pipelines.save("flux2_klein", tmp_path_factory.mktemp("klein") / "distilled", is_distilled=True)
    return load_family("flux2_klein", str(folder))


@pytest.mark.parametrize("num_steps", [1, 4, 28, 200, 1000])
@pytest.mark.parametrize("tokens", [8, 1024, 4096, 4300, 4301, 16384])
def test_the_shift_is_the_stock_pipelines(tokens: int, num_steps: int):
    assert SPEC.shift is not None
    assert SPEC.shift(tokens, num_steps, {}) == compute_empirical_mu(tokens, num_steps)


def config(scale: float) -> DiffusersConfig:
    return DiffusersConfig(sample=SampleConfig(guidance_scale=scale))


def test_guidance_of_a_distilled_model_is_refused_and_without_it_samples_are_stocks(distilled: Family, tmp_path: Path):
    guidance.check(distilled.folder, config(1.0))
    with pytest.raises(
        ConfigError, match=r"guidance_scale = 4.0: .* has is_distilled = True, so it is a distilled .*1"
    ):
        guidance.check(distilled.folder, config(4.0))
    guidance.check(tiny_pipelines.save("flux2_klein", tmp_path / "base"), config(4.0))
    ours = sample(distilled.velocity(), distilled.noise, kernel(distilled, "euler", 4)).latents
    expected = run_stock(distilled.stock, distilled.noise, num_inference_steps=4)
    assert (ours - expected).abs().max() < 1e-4
    # Of the stock pipeline guidance changes nothing.
    assert torch.equal(run_stock(distilled.stock, distilled.noise, num_inference_steps=4, guidance_scale=4.0), expected)


def test_media_are_encoded_as_the_stock_pipeline_encodes_pictures(distilled: Family):
    """To latents of 4 x 4 channels, 8 pixels wide, of the statistics of the VAE."""
    pixels = torch.from_numpy(torch.arange(2 * SIZE[0] * SIZE[1] * 3, device=CPU).remainder(256).byte().numpy())
    pixels = pixels.view(2, 1, *SIZE, 3)
    assert sizes.latent_shape(distilled.folder, SIZE, 1) == (16, 1, SIZE[0] // 8, SIZE[1] // 8)
    unit = (pixels[:, 0].float() / 127.5 - 1).permute(0, 3, 1, 2)
    with torch.no_grad():
        expected = distilled.stock._encode_vae_image(unit, generator=None)
    assert torch.allclose(distilled.model.encode_media(pixels), expected, rtol=0, atol=1e-5)
