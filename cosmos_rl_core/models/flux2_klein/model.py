"""FLUX.2 klein as a velocity field."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from diffusers import Flux2KleinPipeline
from torch import Tensor

from cosmos_rl_core.models._conditioning import Conditioning, Entries
from cosmos_rl_core.models._media import ImageModel, unit_to_pixels
from cosmos_rl_core.models._packing import exact_time
from cosmos_rl_core.models._pictures import centre, scaled
from cosmos_rl_core.models.flux2_klein import SIDE, reference_size
from cosmos_rl_core.pipelines import sizes
from cosmos_rl_core.pipelines.spec import REFERENCE_TOKENS

_REFERENCE_TIME = 10
"""Position in time of the first reference, and the distance to the next one. The generated image has 0."""


class Flux2Klein(ImageModel):
    """FLUX.2 klein. Conditioning: ``prompt_embeds``, and with references ``reference_tokens``.

    The transformer reads padding too.
    """

    stock_class = Flux2KleinPipeline

    def _encode_prompt(self, prompt: str, max_prompt_length: int) -> Entries:
        embeds, _ = self.pipeline.encode_prompt(prompt, device=self._device, max_sequence_length=max_prompt_length)
        return {"prompt_embeds": embeds[0].cpu()}

    def _encode_references(self, references: Sequence[np.ndarray], size: tuple[int, int], frames: int) -> Entries:
        """Scale down large pictures, cut each in its middle to whole tokens, and encode it."""
        if not references:
            return {}
        multiples, encoded = sizes.multiples(self._path), list[Tensor]()
        for reference in references:
            within = reference_size(reference.shape[1:3])
            covered = [side // multiple * multiple for side, multiple in zip(within, multiples, strict=True)]
            picture = centre(scaled(reference[0], within), (covered[0], covered[1]))
            encoded.append(self.encode_media(torch.from_numpy(picture)[None, None])[0].flatten(1).mT)
        return {REFERENCE_TOKENS: torch.cat(encoded).cpu()}

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
        """Predict the velocity: the transformer reads a token a latent, then tokens of references, and t in float32."""
        texts, (height, width) = conditioning["prompt_embeds"], x_t.shape[2:]
        time, tokens = t.to(torch.float32), x_t.flatten(2).mT
        places = [(0, height, width)]
        if REFERENCE_TOKENS in conditioning:
            tokens = torch.cat([tokens, conditioning[REFERENCE_TOKENS]], dim=1)
            places += [(_REFERENCE_TIME * (1 + i), *shape[1:]) for i, shape in enumerate(conditioning.shapes)]
        with exact_time(self.transformer.get_submodule("time_guidance_embed"), 1000 * time):
            predicted = self.transformer(
                hidden_states=tokens,
                timestep=time,
                guidance=None,
                encoder_hidden_states=texts,
                txt_ids=_text_positions(len(x_t), texts.shape[1], x_t.device),
                img_ids=_positions(len(x_t), places, x_t.device),
                return_dict=False,
            )[0].float()
        return predicted[:, : height * width].mT.unflatten(2, (height, width))

    def _normalised(self, latents: Tensor) -> Tensor:
        mean, std = self._statistics()
        return (_squares(latents) - mean) / std

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of squares by channel, ``[1, 4 C, 1, 1]``: the VAE's batch norm."""
        norm: Any = self._vae.bn
        mean, variance = (buffer.view(1, -1, 1, 1) for buffer in (norm.running_mean, norm.running_var))
        return mean, torch.sqrt(variance + self._vae.config.batch_norm_eps)


def _text_positions(batch: int, tokens: int, device: torch.device) -> Tensor:
    """Return the positions of text tokens, ``[B, S, 4]``: 0 in time, rows and columns."""
    return torch.nn.functional.pad(torch.arange(tokens, device=device)[:, None], (3, 0)).expand(batch, -1, -1)


def _positions(batch: int, places: Iterable[tuple[int, int, int]], device: torch.device) -> Tensor:
    """Return the positions of the tokens of images in time, rows, columns and text, ``[B, S, 4]``.

    ``places`` are the time, rows and columns of each image.
    """
    grids: list[Tensor] = []
    for time, *sides in places:
        axes = (torch.arange(side, device=device) for side in sides)
        grids.append(torch.nn.functional.pad(torch.cartesian_prod(*axes), (1, 1)))
        grids[-1][:, 0] = time
    return torch.cat(grids).expand(batch, -1, -1)


def _squares(latents: Tensor) -> Tensor:
    """Return ``[B, 4 C, H / 2, W / 2]`` of latents ``[B, C, H, W]``: squares of 2 x 2, by channel, row and column."""
    rows = latents.unflatten(3, (-1, SIDE)).unflatten(2, (-1, SIDE))
    return rows.permute(0, 1, 3, 5, 2, 4).flatten(1, 3)


def _unsquared(squares: Tensor) -> Tensor:
    """Return the latents ``[B, C, H, W]`` of squares; the inverse of :func:`_squares`."""
    rows = squares.unflatten(1, (-1, SIDE, SIDE))
    return rows.permute(0, 1, 4, 2, 5, 3).flatten(4).flatten(2, 3)


load = Flux2Klein
