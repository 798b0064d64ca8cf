"""Pictures of samples as data URIs."""

import base64
import io
from dataclasses import dataclass

import numpy as np
from PIL import Image

from stages.formats.samples import StoredSample

MAX_SIDE = 256
"""Pictures with a longer side, in pixels, are shrunk to it and become JPEG; the shards hold the exact ones."""
PIXELATED_SIDE = 128
"""Pictures up to this many pixels a side are enlarged without smoothing."""


@dataclass(frozen=True)
class Picture:
    """An image, or the first, middle and last frame of a video."""

    sources: list[str]
    """Data URIs, one a frame."""
    missing: str = ""
    """Why there are none."""
    width: int = 0
    height: int = 0

    @property
    def pixelated(self) -> bool:
        """Return whether it is enlarged without smoothing."""
        return max(self.width, self.height) <= PIXELATED_SIDE


def picture(sample: StoredSample) -> Picture:
    """Return the sample's picture."""
    if not sample.finite:
        return Picture([], "no picture: the sample is not finite")
    if not sample.media:
        return Picture([], "the picture was deleted (rollout.keep.media)")
    frames = sample.pixels
    height, width = frames.shape[1:3]
    shown = sorted({0, len(frames) // 2, len(frames) - 1})
    return Picture([data_uri(frames[i]) for i in shown], "", width, height)


def data_uri(pixels: np.ndarray) -> str:
    """Encode uint8 ``[height, width, 3]``: a small picture exactly, a large one shrunk."""
    image, buffer = Image.fromarray(pixels), io.BytesIO()
    is_large = max(image.size) > MAX_SIDE
    kind, options = ("jpeg", {"quality": 85}) if is_large else ("png", {"optimize": True})
    image.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.LANCZOS)  # leaves a smaller one as it is
    image.save(buffer, format=kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
