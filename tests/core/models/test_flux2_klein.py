"""FLUX.2 klein, in addition to every model's tests: its shift, its latents, and distilled models."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from PIL import Image

from cosmos_rl_core.config.policy import DiffusersConfig, SampleConfig
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.conformance.models.families import CPU, SIZE, Family, kernel, load_family, run_stock
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models._pictures import centre, scaled
from cosmos_rl_core.models.flux2_klein import SPEC, reference_size
from cosmos_rl_core.pipelines import guidance, sizes
from cosmos_rl_core.sampling.rollout import sample


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


def test_a_distilled_model_refuses_guidance_and_samples_like_stock_without_it(distilled: Family, tmp_path: Path):
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


@pytest.mark.parametrize("size", [(64, 512), (1024, 1024), (1023, 1030), (1500, 1100), (700, 2001), (4000, 500)])
def test_a_large_reference_is_scaled_down_as_the_stock_pipeline_does(size: tuple[int, int]):
    """To about 1024 x 1024 pixels, of which the middle is taken in multiples of 16 pixels."""
    picture = np.random.default_rng(1).integers(0, 256, (*size, 3), np.uint8)
    processor, image = Flux2ImageProcessor(vae_scale_factor=16), Image.fromarray(picture)
    processor.check_image_input(image)
    image = processor._resize_if_exceeds_area(image, 1024 * 1024)
    width, height = (side // 16 * 16 for side in image.size)
    expected = processor.preprocess(image, height=height, width=width, resize_mode="crop")
    within = reference_size(size)
    assert within == image.size[::-1]
    found = centre(scaled(picture, within), (height, width))
    assert torch.equal(torch.from_numpy(found / np.float32(255)).permute(2, 0, 1)[None] * 2 - 1, expected)


@pytest.mark.parametrize("size", [(63, 64), (200, 63), (64, 513), (1700, 200)])
def test_a_reference_that_the_stock_pipeline_refuses_is_refused(distilled: Family, size: tuple[int, int]):
    picture = np.zeros((1, *size, 3), np.uint8)
    with pytest.raises(ValueError, match=r"too small|too extreme"):
        Flux2ImageProcessor.check_image_input(Image.fromarray(picture[0]))
    refused = pytest.raises(ConfigError, match=rf"{size[0]} x {size[1]} pixels .*at least 64 .*at most 8 times")
    with refused:
        sizes.reference_tokens(distilled.folder, [size])
    with refused:
        distilled.model.encode_with("a", [picture], 8, SIZE, 1)
