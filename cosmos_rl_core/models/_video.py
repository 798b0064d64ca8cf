"""Latents of causal video VAEs, normalised by channel."""

from typing import Any

import torch
from torch import Tensor

from cosmos_rl_core.models._base import Model
from cosmos_rl_core.models._pixels import pixels_to_unit, unit_to_pixels


class VideoModel(Model):
    """A model with a causal video VAE, whose settings or buffers are ``latents_mean`` and ``latents_std``.

    The VAE keeps the first frame and compresses the others in time.
    """

    @torch.no_grad()
    def encode_media(self, pixels: Tensor) -> Tensor:
        """Encode ``[B, frames, height, width, 3]`` to ``[B, C, T, H, W]``."""
        videos = pixels_to_unit(pixels.to(self._device)).permute(0, 4, 1, 2, 3)
        mean, inverse_std = self._statistics()
        return (self._vae.encode(videos).latent_dist.mode() - mean) * inverse_std

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode ``[B, C, T, H, W]`` to ``[B, frames, height, width, 3]``."""
        mean, inverse_std = self._statistics()
        latents = latents.to(self._device, torch.float32) / inverse_std + mean
        pixels = unit_to_pixels(self._vae.decode(latents, return_dict=False)[0])
        return pixels.permute(0, 2, 3, 4, 1).contiguous()

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Return mean and inverse standard deviation of the latents by channel, ``[1, C, 1, 1, 1]`` float32.

        They are settings of some VAEs (Wan's) and buffers of others (LTX2's). The attribute ``latents_std`` of the
        Cosmos pipeline is not read: it is the deviation in some versions of diffusers and its inverse in others.
        """
        known: Any = dict(self._vae.named_buffers()) | dict(self._vae.config)
        mean, std = (
            torch.as_tensor(known[name], dtype=torch.float32, device=self._device).view(1, -1, 1, 1, 1)
            for name in ("latents_mean", "latents_std")
        )
        return mean, 1.0 / std
