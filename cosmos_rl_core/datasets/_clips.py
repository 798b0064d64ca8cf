"""Frames of media, decoded and cut to one size."""

import itertools
from collections.abc import Iterator, Sequence
from typing import IO

import av
import numpy as np
from PIL import Image, ImageOps

from cosmos_rl_core.datasets._base import ItemError

DAMAGED = (OSError, EOFError, ValueError, SyntaxError, IndexError, Image.DecompressionBombError, av.FFmpegError)
"""Errors of Pillow and FFmpeg for damaged files."""


def read(file: IO[bytes], kind: str, wanted: Sequence[Sequence[int]], size: tuple[int, int]) -> list[np.ndarray]:
    """Return the frames of each clip in ``wanted`` as uint8 RGB ``[frames, height, width, 3]``, decoding once.

    Raises :class:`ItemError` if the file is damaged, or has fewer frames.
    """
    needed, found = {*itertools.chain(*wanted)}, dict[int, np.ndarray]()
    try:
        for index, picture in enumerate(itertools.islice(pictures(file, kind), max(needed) + 1)):
            if index in needed:
                found[index] = fit(picture, size)
    except DAMAGED as error:
        raise ItemError(f"cannot be read: {' '.join(str(error).split()) or type(error).__name__}") from error
    if len(found) < len(needed):
        raise ItemError(f"{len(found)} frames can be decoded, expected {len(needed)}")
    return [np.stack([found[index] for index in clip]) for clip in wanted]


def pictures(file: IO[bytes] | str, kind: str) -> Iterator[Image.Image]:
    """Yield the pictures of a medium, upright, as RGB."""
    if kind == "video":
        with av.open(file, "r") as container:
            for frame in container.decode(video=0):
                yield frame.to_image().rotate(frame.rotation, expand=True)
        return
    with Image.open(file) as picture:
        if picture.mode.startswith(("I", "F")):
            raise ValueError(f"mode {picture.mode}, expected 8 bits a channel")
        upright = ImageOps.exif_transpose(picture)
        yield upright.convert("RGB")


def fit(picture: Image.Image, size: tuple[int, int]) -> np.ndarray:
    """Scale a picture (bicubic) until it just covers ``size`` (height, width), and return its middle.

    Returns uint8 RGB ``[height, width, 3]``. A picture of that size is unchanged; an odd row or column is cut at the
    bottom or right.
    """
    height, width = size
    scale = max(width / picture.width, height / picture.height)
    across = max(width, round(picture.width * scale))
    down = max(height, round(picture.height * scale))
    left, top = (across - width) // 2, (down - height) // 2
    scaled = picture.resize((across, down), Image.Resampling.BICUBIC)
    return np.asarray(scaled.crop((left, top, left + width, top + height)), dtype=np.uint8)
