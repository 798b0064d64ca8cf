"""Every model plugin's pictures against the stock pipeline's: decoded, encoded, and of exported weights.

In float32, and in bfloat16 as in test_against_stock.py.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cosmos_rl_core import plugins
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.conformance.models.families import (
    SCHEDULERS,
    SIZE,
    Family,
    has_autocast,
    kernel,
    moved,
    run_stock,
    stock_pipeline,
    tensors_of,
    write_files,
)
from cosmos_rl_core.models import _media
from cosmos_rl_core.parallel.precision import ParamDtype, computes_in
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.sampling.rollout import sample
from cosmos_rl_core.weights import export
from cosmos_rl_core.weights.parts import CURRENT
from cosmos_rl_core.weights.policy_weights import prepare

LORA = LoraConfig(r=4, lora_alpha=12.0)


def pixels_of(stock_media: Any) -> np.ndarray:
    """Return the stock pipeline's pictures, or lists of pictures, as uint8 ``[B, frames, H, W, 3]``."""
    return np.stack([np.stack([np.asarray(f) for f in (m if isinstance(m, list) else [m])]) for m in stock_media])


def levels_off(ours: Tensor, pixels: np.ndarray, dtype: ParamDtype) -> float:
    """Return how many levels of 255 pictures differ: at most, or in bfloat16 as the root of the mean square."""
    assert ours.dtype == torch.uint8
    assert ours.shape == pixels.shape
    differences = np.abs(ours.cpu().numpy().astype(float) - pixels)
    return float(differences.max() if dtype == "float32" else np.sqrt(np.square(differences).mean()))


def random_pixels(family: Family) -> Tensor:
    """Return two items of smooth colours with some noise."""
    generator = np.random.default_rng(2)
    coarse = generator.integers(0, 256, (2, family.frames, 2, 4, 3)).repeat(16, 2).repeat(16, 3)
    return torch.from_numpy((coarse + generator.integers(-20, 20, coarse.shape)).clip(0, 255).astype(np.uint8))


def test_decoded_latents_are_the_stock_pipelines_pictures(family: Family, dtype: ParamDtype, record_property):
    """To one level of 255. In bfloat16, in which the stock pipeline decodes too, to 1.6."""
    with computes_in(dtype, family.device):
        latents = run_stock(family.stock, family.noise, num_inference_steps=2)
        pictures = pixels_of(run_stock(family.stock, family.noise, num_inference_steps=2, output_type="pil"))
    decoded = family.model.decode(latents.float())
    assert decoded.shape == (2, family.frames, *SIZE, 3)
    drift = levels_off(decoded, pictures, dtype)
    record_property("drift", drift)
    assert drift <= {"float32": 1, "bfloat16": 3}[dtype]
    assert pictures.std() > 3


def test_encoding_is_what_decoding_undoes(family: Family, dtype: ParamDtype, record_property):
    """Latents that are scaled for the model and back are the encoder's own, without a draw from its posterior.

    To one level of 255. In bfloat16, in which the stock VAE codes here, to 1.7.
    """
    pixels = random_pixels(family)
    latents = family.model.encode_media(pixels)
    assert latents.dtype == torch.float32
    assert latents.shape == (2, *family.model.latent_shape(SIZE, family.frames))
    assert torch.equal(latents, family.model.encode_media(pixels))
    vae, unit = family.stock.vae, (pixels.to(family.device).float() / 127.5 - 1).permute(0, 4, 1, 2, 3)
    of_videos = any(isinstance(module, nn.Conv3d) for module in vae.modules())
    with torch.no_grad(), computes_in(dtype, family.device):
        encoded = vae.encode(unit if of_videos else unit[:, :, 0])
        raw = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latent
        images = vae.decode(raw).sample.float()
    expected = _media.unit_to_pixels(images if of_videos else images[:, :, None]).permute(0, 2, 3, 4, 1)
    drift = levels_off(family.model.decode(latents), expected.cpu().numpy(), dtype)
    record_property("drift", drift)
    assert drift <= {"float32": 1, "bfloat16": 3.5}[dtype]
    assert (latents - family.arranged(raw)).abs().max() > 0.05
    assert expected.float().std() > 3


def test_a_draw_from_the_posterior_is_the_stock_vaes_own(family: Family):
    """Its ``DiagonalGaussianDistribution`` draws; shifted and scaled as encode_media does with its mode."""
    settings = directories.settings(family.folder, "vae")
    has = directories.spec(family.folder).vaes[settings["_class_name"]].posterior
    vae, pixels = family.stock.vae, random_pixels(family)
    unit = (pixels.to(family.device).float() / 127.5 - 1).permute(0, 4, 1, 2, 3)
    of_videos = any(isinstance(module, nn.Conv3d) for module in vae.modules())
    with torch.no_grad():
        encoded = vae.encode(unit if of_videos else unit[:, :, 0])
    assert hasattr(encoded, "latent_dist") == has
    if not has:
        return
    mode, deviation = family.model.encode_posterior(pixels)
    assert torch.equal(mode, family.model.encode_media(pixels))
    assert deviation.min() > 0
    posterior = encoded.latent_dist
    drawn = posterior.sample(torch.Generator(device=family.device).manual_seed(3))
    noise = family.arranged((drawn - posterior.mode()) / posterior.std)
    # What decoding undoes: the model's own latents of the drawn ones.
    pictures = family.model.decode(mode + deviation * noise)
    with torch.no_grad():
        images = vae.decode(drawn).sample.float()
    expected = _media.unit_to_pixels(images if of_videos else images[:, :, None]).permute(0, 2, 3, 4, 1)
    assert levels_off(pictures, expected.cpu().numpy(), "float32") <= 1
    assert not torch.equal(pictures, family.model.decode(mode))


@pytest.mark.parametrize("kept_in", [torch.float32, torch.bfloat16])
def test_every_pixel_level_survives_scaling_and_rounding(kept_in: torch.dtype, device: torch.device):
    """Also in bfloat16, whose 8 bits are at most a quarter of a level off."""
    levels = torch.arange(256, dtype=torch.uint8, device=device)
    assert torch.equal(_media.unit_to_pixels(_media.pixels_to_unit(levels).to(kept_in).float()), levels)
    assert _media.unit_to_pixels(torch.tensor([-2.0, 2.0], device=device)).tolist() == [0, 255]


@pytest.mark.parametrize("lora", [LORA, pytest.param(None, marks=pytest.mark.slow)], ids=["lora", "full"])
def test_exported_weights_make_the_policys_pictures_in_the_stock_pipeline(
    family: Family, lora: LoraConfig | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property
):
    """Latents in bfloat16 are 0.072 off, and pictures, which the stock pipeline decodes in it too, 1.3 levels."""
    model = family.load("transformer", "vae")
    weights = prepare(model.transformer, lora)
    weights.load(CURRENT, moved(tensors_of(weights, CURRENT), 0.2 if lora else 0.05))
    files = (
        export.lora_files(tensors_of(weights, CURRENT), lora)
        if lora
        else export.full_pipeline(family.folder, tensors_of(weights, CURRENT))
    )
    write_files(files, tmp_path)
    if lora is None:
        assert directories.pipeline_files(tmp_path) == directories.pipeline_files(family.folder)
    stock = stock_pipeline(family.folder if lora else tmp_path, family.device)
    if lora:
        stock.load_lora_weights(tmp_path / "lora", weight_name="model.safetensors", adapter_name="default")
        adapter = stock.transformer.peft_config["default"]
        assert (adapter.r, adapter.lora_alpha) == (4, 12.0)
    monkeypatch.setattr(stock, "scheduler", SCHEDULERS["euler"]())
    steps = kernel(replace(family, stock=stock), "euler", 3)

    def ours_in(dtype: ParamDtype) -> Tensor:
        def velocity(x: Tensor, t: Tensor) -> Tensor:
            with computes_in(dtype, family.device):
                return model.velocity(x, t, family.conditioning)

        with weights.use(CURRENT):
            return sample(velocity, family.noise, steps).latents

    dtypes: tuple[ParamDtype, ...] = ("float32", "bfloat16") if has_autocast(family.device) else ("float32",)
    base = sample(family.velocity(), family.noise, steps).latents
    shipped = family.name in plugins.own("models")
    for dtype in dtypes:
        ours = ours_in(dtype)
        with computes_in(dtype, family.device):
            theirs = run_stock(stock, family.noise, num_inference_steps=3)
            pictures = pixels_of(run_stock(stock, family.noise, num_inference_steps=3, output_type="pil"))
        drift, levels = float((ours - theirs).abs().max()), levels_off(model.decode(ours), pictures, dtype)
        record_property(dtype, [drift, levels])
        assert drift < {"float32": 1e-4, "bfloat16": (0.05 if shipped else 0.09) * family.half_factor}[dtype]
        assert levels <= {"float32": 1, "bfloat16": 3}[dtype]
        assert (ours - base).abs().max() > 0.05
