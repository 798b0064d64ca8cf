"""Latents of samples to pixels, in the precision that a recipe chooses for the VAE."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from cosmos_rl_core.config.shared import Decoding
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models._base import Model
from cosmos_rl_core.models._media import NotFiniteError
from cosmos_rl_core.parallel.precision import computes_in, with_tf32


@contextmanager
def decodes_in(decoding: Decoding, device: torch.device) -> Iterator[None]:
    """Compute in the dtype of ``decoding``, with TF32 if it allows that, inside the ``with`` block."""
    with with_tf32(decoding.tf32), computes_in(decoding.dtype, device):
        yield


@torch.no_grad()
def decode_finite(model: Model, latents: Tensor, finite: list[bool]) -> list[np.ndarray | None]:
    """Return the pixels ``[frames, height, width, 3]`` of each sample of ``latents`` ``[B, ...]``, on the CPU.

    None for a sample that is not ``finite``, or whose pixels are not. Zeros replace the latents of such samples: the
    size of the batch stays, and with it the bits of the other samples. Raises :class:`ConfigError` if the model's
    ``decode`` returns other shapes or dtypes than uint8 ``[B, frames, height, width, 3]``.
    """

    def pixels(kept: list[bool]) -> np.ndarray:
        mask = torch.tensor(kept, device=latents.device).view(-1, *[1] * (latents.ndim - 1))
        found = model.decode(latents if all(kept) else latents.where(mask, 0)).cpu().numpy()
        if found.ndim != 5 or found.shape[-1] != 3 or len(found) != len(latents) or found.dtype != np.uint8:
            raise ConfigError(
                f"{type(model).__module__}: decode() returns {found.dtype} {list(found.shape)} for {len(latents)} "
                "samples; expected uint8 [B, frames, height, width, 3]"
            )
        return found

    def has_pixels(place: int) -> bool:
        try:
            pixels([other == place for other in range(len(finite))])
        except NotFiniteError:
            return False
        return True

    try:
        found = pixels(finite)
    except NotFiniteError:
        finite = [is_finite and has_pixels(place) for place, is_finite in enumerate(finite)]
        found = pixels(finite)
    return [picture if kept else None for picture, kept in zip(found, finite, strict=True)]
