"""SANA-Video: text to video, Gemma's text, 5-D latents of Wan's causal video VAE."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import SanaVideoPipeline
from torch import Tensor, nn

from cosmos_rl_core import pipelines
from cosmos_rl_core.models import _loading, _sana
from cosmos_rl_core.models._base import Conditioning

PIPELINE_CLASSES = ("SanaVideoPipeline",)
TAKES_INSTRUCTION = True
STOCK_MULTIPLE = 32
"""The stock pipeline refuses sides that are no multiple of it, whatever the VAE's own factor."""


class SanaVideo:
    """See :class:`cosmos_rl_core.models._base.Model`. Conditioning: ``prompt_embeds`` and ``prompt_attention_mask``."""

    negative_prompt = ""
    complex_human_instruction: Sequence[str] | None = None
    """Comes before every prompt but the empty one; None means that of the stock pipeline's call."""

    def __init__(self, path: str, components: tuple[str, ...], device: torch.device) -> None:
        _sana.check(path, "AutoencoderKLWan")
        self._pipeline = _loading.load_pipeline(SanaVideoPipeline, path, components, device)
        self._transformer_config = pipelines.read_json(path, "transformer", "config.json")
        self._vae_config = pipelines.read_json(path, "vae", "config.json")
        self._device = device
        self.scheduler = self._pipeline.scheduler

    @property
    def transformer(self) -> nn.Module:
        """The denoiser."""
        return _loading.require(self._pipeline.transformer, "transformer")

    def encode_prompts(self, prompts: list[str], max_prompt_length: int) -> list[Conditioning]:
        """One by one; on the CPU. Its authors end prompts with "motion score: 30."; that is for the dataset to do."""
        _loading.require(self._pipeline.text_encoder, "text")
        return [
            _sana.encode_prompt(self._pipeline, prompt, max_prompt_length, self.complex_human_instruction, self._device)
            for prompt in prompts
        ]

    def latent_shape(self, size: tuple[int, int], frames: int) -> tuple[int, ...]:
        """``[C, T, H, W]``; the VAE keeps the first frame and compresses the others in time."""
        spatial, temporal = self._vae_config["scale_factor_spatial"], self._vae_config["scale_factor_temporal"]
        patch_t, patch_h, patch_w = self._transformer_config["patch_size"]
        _loading.check_multiple(size, math.lcm(STOCK_MULTIPLE, spatial * patch_h, spatial * patch_w))
        latent_frames = _loading.latent_frames(frames, temporal, patch_t)
        return (self._vae_config["z_dim"], latent_frames, size[0] // spatial, size[1] // spatial)

    @torch.no_grad()
    def encode_media(self, pixels: Tensor) -> Tensor:
        """``[B, frames, height, width, 3]`` to ``[B, C, T, H, W]``."""
        videos = _loading.pixels_to_unit(pixels.to(self._device)).permute(0, 4, 1, 2, 3)
        mean, std = self._statistics()
        return (self._vae().encode(videos).latent_dist.mode() - mean) / std

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """``[B, C, T, H, W]`` to ``[B, frames, height, width, 3]``."""
        mean, std = self._statistics()
        latents = latents.to(self._device, torch.float32) * std + mean
        pixels = _loading.unit_to_pixels(self._vae().decode(latents, return_dict=False)[0])
        return pixels.permute(0, 2, 3, 4, 1).contiguous()

    def velocity(self, x_t: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """The transformer is fed ``1000 t``, never a rounded number as by the stock scheduler."""
        timestep = t * self.scheduler.config.num_train_timesteps
        return _sana.velocity(self.transformer, x_t, timestep, conditioning)

    def _vae(self) -> Any:
        return _loading.require(self._pipeline.vae, "vae")

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the latents by channel, ``[1, C, 1, 1, 1]``."""
        mean, std = (
            torch.tensor(self._vae_config[name], dtype=torch.float32, device=self._device).view(1, -1, 1, 1, 1)
            for name in ("latents_mean", "latents_std")
        )
        return mean, std


def load(path: str, components: tuple[str, ...], device: torch.device) -> SanaVideo:
    """Load the named components of the pipeline directory ``path``, float32, frozen, in eval mode.

    Raises :class:`ConfigError` on another VAE than Wan's, and on distilled models, which are told the guidance scale.
    """
    return SanaVideo(path, components, device)
