"""Pixels of samples, checked before a scorer computes with them."""

import numpy as np

from cosmos_rl_core.rewards._base import Sample


def frames_of(sample: Sample) -> np.ndarray:
    """Return the sample's frames, uint8 ``[frames, height, width, 3]``. Raises ``ValueError`` for anything else."""
    pixels = np.asarray(sample.pixels)
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[-1] != 3 or pixels.size == 0:
        found = f"{pixels.dtype} {list(pixels.shape)}"
        raise ValueError(f"expected uint8 pixels [frames, height, width, 3], got {found}")
    return pixels


def no_reference(sample: Sample) -> ValueError:
    """Return the error for a sample that needs references to be compared with, if its prompt has none."""
    return ValueError(f"prompt {sample.prompt_id} has no reference to compare with")
