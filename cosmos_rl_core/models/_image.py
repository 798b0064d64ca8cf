"""Latents of ``AutoencoderKL``, shifted and scaled: shared by image plugins."""

import torch
from torch import Tensor

from cosmos_rl_core.models import _loading
from cosmos_rl_core.models._adapter import Adapter


class ImageAdapter(Adapter):
    """An adapter of a pipeline whose VAE is an ``AutoencoderKL`` with a shift and a scale."""

    @torch.no_grad()
    def encode_media(self, pixels: Tensor) -> Tensor:
        """Encode one frame a sample: ``[B, 1, height, width, 3]`` to ``[B, C, H, W]``."""
        vae = self._vae
        images = _loading.pixels_to_unit(pixels[:, 0].to(self._device)).permute(0, 3, 1, 2)
        return (vae.encode(images).latent_dist.mode() - vae.config.shift_factor) * vae.config.scaling_factor

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode ``[B, C, H, W]`` to ``[B, 1, height, width, 3]``."""
        vae = self._vae
        latents = latents.to(self._device, torch.float32) / vae.config.scaling_factor + vae.config.shift_factor
        pixels = _loading.unit_to_pixels(vae.decode(latents, return_dict=False)[0])
        return pixels.permute(0, 2, 3, 1)[:, None].contiguous()
