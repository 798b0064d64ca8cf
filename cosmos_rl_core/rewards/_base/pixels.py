"""Pixels of samples, checked before a scorer computes with them."""

import numpy as np

from cosmos_rl_core.rewards._base import Sample


def frames_of(sample: Sample) -> np.ndarray:
    """Return the sample's frames. Raises ``ValueError`` if they are no pictures."""
    pixels = np.asarray(sample.pixels)
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[-1] != 3 or pixels.size == 0:
        found = f"{pixels.dtype} {list(pixels.shape)}"
        raise ValueError(f"expected uint8 pixels [frames, height, width, 3], got {found}")
    return pixels


def no_reference(sample: Sample) -> ValueError:
    """Return the error of a sample that would be compared with references, whose prompt has none."""
    return ValueError(f"prompt {sample.prompt_id} has no reference to compare with")
