"""SANA and SANA 1.5: text to image, Gemma's text, 4-D latents of a deep-compression autoencoder."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import SanaPipeline
from torch import Tensor, nn

from cosmos_rl_core import pipelines
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models import _loading, _sana
from cosmos_rl_core.models._base import Conditioning

PIPELINE_CLASSES = ("SanaPipeline",)
TAKES_INSTRUCTION = True
STOCK_MULTIPLE = 32
"""The stock pipeline refuses sides that are no multiple of it, whatever the VAE's own factor."""


class Sana:
    """See :class:`cosmos_rl_core.models._base.Model`. Conditioning: ``prompt_embeds`` and ``prompt_attention_mask``."""

    negative_prompt = ""
    complex_human_instruction: Sequence[str] | None = None
    """Comes before every prompt but the empty one; None means that of the stock pipeline's call."""

    def __init__(self, path: str, components: tuple[str, ...], device: torch.device) -> None:
        _sana.check(path, "AutoencoderDC")
        self._pipeline = _loading.load_pipeline(SanaPipeline, path, components, device)
        self._transformer_config = pipelines.read_json(path, "transformer", "config.json")
        self._vae_config = pipelines.read_json(path, "vae", "config.json")
        self._device = device
        self.scheduler = self._pipeline.scheduler

    @property
    def transformer(self) -> nn.Module:
        """The denoiser."""
        return _loading.require(self._pipeline.transformer, "transformer")

    def encode_prompts(self, prompts: list[str], max_prompt_length: int) -> list[Conditioning]:
        """One by one; on the CPU."""
        _loading.require(self._pipeline.text_encoder, "text")
        return [
            _sana.encode_prompt(self._pipeline, prompt, max_prompt_length, self.complex_human_instruction, self._device)
            for prompt in prompts
        ]

    def latent_shape(self, size: tuple[int, int], frames: int) -> tuple[int, ...]:
        """``[C, H, W]``."""
        if frames != 1:
            raise ConfigError(f"this model makes images: frames must be 1, got {frames}")
        scale = 2 ** (len(self._vae_config["encoder_block_out_channels"]) - 1)
        _loading.check_multiple(size, math.lcm(STOCK_MULTIPLE, scale * self._transformer_config["patch_size"]))
        return (self._transformer_config["in_channels"], size[0] // scale, size[1] // scale)

    @torch.no_grad()
    def encode_media(self, pixels: Tensor) -> Tensor:
        """One frame a sample: ``[B, 1, height, width, 3]`` to ``[B, C, H, W]``. The encoder has no posterior."""
        vae = self._vae()
        images = _loading.pixels_to_unit(pixels[:, 0].to(self._device)).permute(0, 3, 1, 2)
        return vae.encode(images).latent * vae.config.scaling_factor

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """``[B, C, H, W]`` to ``[B, 1, height, width, 3]``."""
        vae = self._vae()
        latents = latents.to(self._device, torch.float32) / vae.config.scaling_factor
        pixels = _loading.unit_to_pixels(vae.decode(latents, return_dict=False)[0])
        return pixels.permute(0, 2, 3, 1)[:, None].contiguous()

    def velocity(self, x_t: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """The transformer is fed ``1000 t`` times its own scale, never a rounded number as by the stock scheduler."""
        timestep = t * self.scheduler.config.num_train_timesteps * self._transformer_config.get("timestep_scale", 1.0)
        return _sana.velocity(self.transformer, x_t, timestep, conditioning)

    def _vae(self) -> Any:
        return _loading.require(self._pipeline.vae, "vae")


def load(path: str, components: tuple[str, ...], device: torch.device) -> Sana:
    """Load the named components of the pipeline directory ``path``, float32, frozen, in eval mode.

    Raises :class:`ConfigError` on distilled models, which are told the guidance scale.
    """
    return Sana(path, components, device)
