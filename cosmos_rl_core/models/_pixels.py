"""Pixels as a VAE takes and returns them."""

import torch
from torch import Tensor


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
