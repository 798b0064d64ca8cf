"""Pictures before a VAE encodes them, scaled and cropped like stock does it: uint8 ``[height, width, 3]``."""

import numpy as np
from PIL import Image

LANCZOS, BILINEAR = Image.Resampling.LANCZOS, Image.Resampling.BILINEAR


def scaled(picture: np.ndarray, size: tuple[int, int], resampling: Image.Resampling = LANCZOS) -> np.ndarray:
    """Return a copy scaled to ``size`` (height and width in pixels) by a filter of Pillow.

    Source: ``VaeImageProcessor`` of diffusers, whose default filter is Lanczos'.
    """
    height, width = size
    return np.array(Image.fromarray(picture).resize((width, height), resampling))


def centre(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return the middle of the picture, ``size`` (height and width in pixels) large.

    If an odd number of pixels is cut, one more goes at the bottom or at the right.
    """
    top, left = ((side - wanted) // 2 for side, wanted in zip(picture.shape, size, strict=False))
    return picture[top : top + size[0], left : left + size[1]]
