"""Wan 2.1: text to video, one text encoder, 5-D latents of a causal video VAE."""

import math
from typing import Any

import torch
from diffusers import WanPipeline
from torch import Tensor, nn

from cosmos_rl_core import pipelines
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models import _loading
from cosmos_rl_core.models._base import Conditioning

PIPELINE_CLASSES = ("WanPipeline",)

STOCK_MULTIPLE = 16
"""The stock pipeline refuses sides that are no multiple of it, whatever the VAE's own factor."""


class Wan:
    """See :class:`cosmos_rl_core.models._base.Model`. Conditioning: ``prompt_embeds``, zero after the last token."""

    negative_prompt = ""

    def __init__(self, path: str, components: tuple[str, ...], device: torch.device) -> None:
        self._transformer_config = pipelines.read_json(path, "transformer", "config.json")
        self._vae_config = pipelines.read_json(path, "vae", "config.json")
        _check_is_one_stage_text_to_video(path, self._transformer_config, self._vae_config)
        self._pipeline = _loading.load_pipeline(WanPipeline, path, components, device)
        self._device = device
        self.scheduler = self._pipeline.scheduler

    @property
    def transformer(self) -> nn.Module:
        """The denoiser."""
        return _loading.require(self._pipeline.transformer, "transformer")

    @torch.no_grad()
    def encode_prompts(self, prompts: list[str], max_prompt_length: int) -> list[Conditioning]:
        """One by one; on the CPU."""
        _loading.require(self._pipeline.text_encoder, "text")
        return [self._encode_prompt(prompt, max_prompt_length) for prompt in prompts]

    def _encode_prompt(self, prompt: str, max_prompt_length: int) -> Conditioning:
        embeds, _ = self._pipeline.encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=max_prompt_length, device=self._device
        )
        return {"prompt_embeds": embeds[0].cpu()}

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
        latents = self._vae().encode(videos).latent_dist.mode()
        mean, inverse_std = self._statistics()
        return (latents - mean) * inverse_std

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """``[B, C, T, H, W]`` to ``[B, frames, height, width, 3]``."""
        mean, inverse_std = self._statistics()
        latents = latents.to(self._device, torch.float32) / inverse_std + mean
        pixels = _loading.unit_to_pixels(self._vae().decode(latents, return_dict=False)[0])
        return pixels.permute(0, 2, 3, 4, 1).contiguous()

    def velocity(self, x_t: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """The transformer is fed ``1000 t`` as float32, never a rounded number."""
        return self.transformer(
            hidden_states=x_t,
            timestep=(t * self.scheduler.config.num_train_timesteps).to(torch.float32),
            encoder_hidden_states=conditioning["prompt_embeds"],
            return_dict=False,
        )[0].float()

    def _vae(self) -> Any:
        return _loading.require(self._pipeline.vae, "vae")

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and inverse standard deviation of the latents by channel, ``[1, C, 1, 1, 1]``."""
        mean, std = (
            torch.tensor(self._vae_config[name], dtype=torch.float32, device=self._device).view(1, -1, 1, 1, 1)
            for name in ("latents_mean", "latents_std")
        )
        return mean, 1.0 / std


def load(path: str, components: tuple[str, ...], device: torch.device) -> Wan:
    """Load the named components of the pipeline directory ``path``, float32, frozen, in eval mode.

    Raises :class:`ConfigError` on Wan 2.2's pipelines (two stages, timesteps by token) and on image-to-video ones.
    """
    return Wan(path, components, device)


def _check_is_one_stage_text_to_video(path: str, transformer: dict, vae: dict) -> None:
    index = pipelines.read_json(path, pipelines.INDEX)
    if index.get("boundary_ratio") is not None or index.get("expand_timesteps"):
        raise ConfigError(
            f"{path!r} is a Wan 2.2 pipeline (boundary_ratio or expand_timesteps); only Wan 2.1 is supported"
        )
    if transformer["in_channels"] != vae["z_dim"]:
        raise ConfigError(
            f"{path!r}: the transformer takes {transformer['in_channels']} channels and the VAE makes {vae['z_dim']}: "
            "not a text-to-video model"
        )
