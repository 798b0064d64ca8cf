"""Latents of image VAEs, shifted and scaled by one number each."""

from typing import Any

import torch
from torch import Tensor

from cosmos_rl_core.models._base import Model
from cosmos_rl_core.models._pixels import pixels_to_unit, unit_to_pixels


class ImageModel(Model):
    """A model whose VAE has the settings ``scaling_factor`` and maybe ``shift_factor``, such as ``AutoencoderKL``."""

    @torch.no_grad()
    def encode_media(self, pixels: Tensor) -> Tensor:
        """Encode one frame a sample: ``[B, 1, height, width, 3]`` to ``[B, C, H, W]``."""
        images = pixels_to_unit(pixels[:, 0].to(self._device)).permute(0, 3, 1, 2)
        return (self._mode(self._vae.encode(images)) - self._shift) * self._vae.config.scaling_factor

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode ``[B, C, H, W]`` to ``[B, 1, height, width, 3]``."""
        latents = latents.to(self._device, torch.float32) / self._vae.config.scaling_factor + self._shift
        pixels = unit_to_pixels(self._vae.decode(latents, return_dict=False)[0])
        return pixels.permute(0, 2, 3, 1)[:, None].contiguous()

    def _mode(self, encoded: Any) -> Tensor:
        """Return the mode of the VAE's posterior."""
        return encoded.latent_dist.mode()

    @property
    def _shift(self) -> float:
        return self._vae.config.get("shift_factor") or 0.0
