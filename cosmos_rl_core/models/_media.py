"""Pixels of images and videos, and the latents that VAEs of diffusers make of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cosmos_rl_core.models._base import Model
from cosmos_rl_core.models._conditioning import Entries, given_frames
from cosmos_rl_core.models._pictures import LANCZOS, scaled


class NotFiniteError(ArithmeticError):
    """Decoded pixels of at least one sample of a batch are NaN or infinite."""


def pixels_to_unit(pixels: Tensor) -> Tensor:
    """Return uint8 pixels as float32 in [-1, 1], scaled like the stock image processor does."""
    return 2.0 * (pixels.float() / 255.0) - 1.0


def unit_to_pixels(images: Tensor) -> Tensor:
    """Return values in [-1, 1] as uint8, clamped and rounded half to even like the stock image processor does for PIL.

    Raises :class:`NotFiniteError` for a value that is not finite, which would become black.
    """
    if not images.isfinite().all():
        raise NotFiniteError("decoded pixels are not finite")
    return ((images.float() * 0.5 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)


class ImageModel(Model):
    """A model whose VAE has the settings ``scaling_factor`` and maybe ``shift_factor``, such as ``AutoencoderKL``."""

    @torch.no_grad()
    def encode_media(self, pixels: Tensor) -> Tensor:
        """Encode one frame a sample: ``[B, 1, height, width, 3]`` to ``[B, C, H, W]``."""
        return self._normalised(self._mode(self._encoded(pixels)))

    @torch.no_grad()
    def encode_posterior(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return mode and standard deviation of the posterior of one frame a sample, each ``[B, C, H, W]``."""
        posterior = self._encoded(pixels).latent_dist
        return self._normalised(posterior.mode()), posterior.std * self._vae.config.scaling_factor

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode ``[B, C, H, W]`` to ``[B, 1, height, width, 3]``."""
        latents = latents.to(self._device, torch.float32) / self._vae.config.scaling_factor + self._shift
        pixels = unit_to_pixels(self._vae.decode(latents, return_dict=False)[0])
        return pixels.permute(0, 2, 3, 1)[:, None].contiguous()

    def _encoded(self, pixels: Tensor) -> Any:
        return self._vae.encode(pixels_to_unit(pixels[:, 0].to(self._device)).permute(0, 3, 1, 2))

    def _normalised(self, latents: Tensor) -> Tensor:
        return (latents - self._shift) * self._vae.config.scaling_factor

    def _mode(self, encoded: Any) -> Tensor:
        """Return the mode of the VAE's posterior."""
        return encoded.latent_dist.mode()

    @property
    def _shift(self) -> float:
        return self._vae.config.get("shift_factor") or 0.0


class VideoModel(Model):
    """A model with a causal video VAE that has ``latents_mean`` and ``latents_std``, as settings or as buffers.

    The VAE keeps the first frame and compresses the others in time.
    """

    @torch.no_grad()
    def encode_media(self, pixels: Tensor) -> Tensor:
        """Encode ``[B, frames, height, width, 3]`` to ``[B, C, T, H, W]``."""
        mean, inverse_std = self._statistics()
        return (self._posterior(pixels).mode() - mean) * inverse_std

    @torch.no_grad()
    def encode_posterior(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return mode and standard deviation of the posterior of videos, each ``[B, C, T, H, W]``."""
        mean, inverse_std = self._statistics()
        posterior = self._posterior(pixels)
        return (posterior.mode() - mean) * inverse_std, posterior.std * inverse_std

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode ``[B, C, T, H, W]`` to ``[B, frames, height, width, 3]``."""
        mean, inverse_std = self._statistics()
        latents = latents.to(self._device, torch.float32) / inverse_std + mean
        pixels = unit_to_pixels(self._vae.decode(latents, return_dict=False)[0])
        return pixels.permute(0, 2, 3, 4, 1).contiguous()

    def _encode_first_frames(
        self,
        references: Sequence[np.ndarray],
        size: tuple[int, int],
        frames: int,
        resampling: Image.Resampling = LANCZOS,
    ) -> Entries:
        """Encode the reference, a picture or a clip stretched to the video's size, as the video's first latent frames.

        Without a reference no frame is given. The entries have the same shapes then, so that prompts with and without
        references fit in one batch.
        """
        channels, num_latent_frames, *sides = self.latent_shape(size, frames)
        if not references:
            return given_frames(torch.zeros(channels, 0, *sides, device="cpu"), num_latent_frames)
        first = np.stack([scaled(frame, size, resampling) for frame in references[0]])
        return given_frames(self.encode_media(torch.from_numpy(first)[None])[0].cpu(), num_latent_frames)

    def _posterior(self, pixels: Tensor) -> Any:
        return self._vae.encode(pixels_to_unit(pixels.to(self._device)).permute(0, 4, 1, 2, 3)).latent_dist

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
