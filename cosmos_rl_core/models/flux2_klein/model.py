"""FLUX.2 klein as a velocity field."""

from typing import Any

import torch
from diffusers import Flux2KleinPipeline
from torch import Tensor

from cosmos_rl_core.models._conditioning import Conditioning, Entries
from cosmos_rl_core.models._media import ImageModel, unit_to_pixels
from cosmos_rl_core.models._packing import exact_time
from cosmos_rl_core.models.flux2_klein import SIDE


class Flux2Klein(ImageModel):
    """FLUX.2 klein. Conditioning: ``prompt_embeds``. The transformer reads padding too."""

    stock_class = Flux2KleinPipeline

    def _encode_prompt(self, prompt: str, max_prompt_length: int) -> Entries:
        embeds, _ = self.pipeline.encode_prompt(prompt, device=self._device, max_sequence_length=max_prompt_length)
        return {"prompt_embeds": embeds[0].cpu()}

    @torch.no_grad()
    def encode_posterior(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return mode and standard deviation of the posterior of one frame a sample, each ``[B, 4 C, H, W]``."""
        posterior = self._encoded(pixels).latent_dist
        return self._normalised(posterior.mode()), _squares(posterior.std) / self._statistics()[1]

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode ``[B, 4 C, H, W]`` to ``[B, 1, height, width, 3]``."""
        mean, std = self._statistics()
        raw = _unsquared(latents.to(self._device, torch.float32) * std + mean)
        pixels = unit_to_pixels(self._vae.decode(raw, return_dict=False)[0])
        return pixels.permute(0, 2, 3, 1)[:, None].contiguous()

    def velocity(self, x_t: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """Predict from one token a latent; the transformer gets t itself in float32."""
        texts, (height, width) = conditioning["prompt_embeds"], x_t.shape[2:]
        time = t.to(torch.float32)
        with exact_time(self.transformer.get_submodule("time_guidance_embed"), 1000 * time):
            tokens = self.transformer(
                hidden_states=x_t.flatten(2).mT,
                timestep=time,
                guidance=None,
                encoder_hidden_states=texts,
                txt_ids=_positions(len(x_t), (1, 1, 1, texts.shape[1]), x_t.device),
                img_ids=_positions(len(x_t), (1, height, width, 1), x_t.device),
                return_dict=False,
            )[0].float()
        return tokens.mT.unflatten(2, (height, width))

    def _normalised(self, latents: Tensor) -> Tensor:
        mean, std = self._statistics()
        return (_squares(latents) - mean) / std

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of squares by channel, ``[1, 4 C, 1, 1]``: the VAE's batch norm."""
        norm: Any = self._vae.bn
        mean, variance = (buffer.view(1, -1, 1, 1) for buffer in (norm.running_mean, norm.running_var))
        return mean, torch.sqrt(variance + self._vae.config.batch_norm_eps)


def _positions(batch: int, counts: tuple[int, int, int, int], device: torch.device) -> Tensor:
    """Return the positions of tokens in time, rows, columns and text, ``[B, S, 4]``."""
    axes = (torch.arange(count, device=device) for count in counts)
    return torch.cartesian_prod(*axes).expand(batch, -1, -1)


def _squares(latents: Tensor) -> Tensor:
    """Return ``[B, 4 C, H / 2, W / 2]`` of latents ``[B, C, H, W]``: squares of 2 x 2, by channel, row and column."""
    rows = latents.unflatten(3, (-1, SIDE)).unflatten(2, (-1, SIDE))
    return rows.permute(0, 1, 3, 5, 2, 4).flatten(1, 3)


def _unsquared(squares: Tensor) -> Tensor:
    """Return the latents ``[B, C, H, W]`` of squares; the inverse of :func:`_squares`."""
    rows = squares.unflatten(1, (-1, SIDE, SIDE))
    return rows.permute(0, 1, 4, 2, 5, 3).flatten(4).flatten(2, 3)


load = Flux2Klein
