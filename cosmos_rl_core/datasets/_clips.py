"""Frames of media, decoded and cut to one size."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

import av
import numpy as np
from av.container import InputContainer
from PIL import Image, UnidentifiedImageError
from PIL.Image import Transpose

from cosmos_rl_core.datasets._base import ItemError
from cosmos_rl_core.datasets._files import line

IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""Formats that Pillow decodes by itself: for EPS it starts another program."""
VIDEO_FORMATS = "mov,matroska,avi,mpegts,mpeg,flv,ogg,asf"
"""Formats of FFmpeg whose frames are in the file: a playlist opens further files, and SDP waits for a stream."""
SIDEWAYS = frozenset({Transpose.TRANSPOSE, Transpose.ROTATE_270, Transpose.TRANSVERSE, Transpose.ROTATE_90})
"""Turns that swap height and width."""
DAMAGED = (OSError, EOFError, ValueError, SyntaxError, IndexError, Image.DecompressionBombError, av.FFmpegError)
"""Errors of Pillow and FFmpeg for damaged files."""
MOST_SCALED = 2**30
"""Most pixels of a scaled picture before it is cut. Of a thin strip, which would have more, the middle is scaled."""

_ORIENTATION = 0x0112
"""Number of EXIF's tag for the orientation."""
_TURNS: dict[Any, Transpose] = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}


def read(file: IO[bytes], kind: str, wanted: Sequence[Sequence[int]], size: tuple[int, int]) -> list[np.ndarray]:
    """Return the frames of each clip in ``wanted`` as uint8 RGB ``[frames, height, width, 3]``, decoding once.

    Raises :class:`ItemError` if the file is damaged, or has fewer frames.
    """
    needed, found = {*itertools.chain(*wanted)}, dict[int, np.ndarray]()
    with damage():
        for index, picture in enumerate(itertools.islice(pictures(file, kind), max(needed) + 1)):
            if index in needed:
                found[index] = fit(picture, size)
    if len(found) < len(needed):
        raise ItemError(f"{len(found)} frames can be decoded, expected {len(needed)}")
    return [np.stack([found[index] for index in clip]) for clip in wanted]


@contextmanager
def damage() -> Iterator[None]:
    """Turn errors of Pillow and FFmpeg into :class:`ItemError`."""
    try:
        yield
    except ItemError:
        raise
    except DAMAGED as error:
        reason = error.strerror if isinstance(error, av.FFmpegError) else None
        raise ItemError(f"cannot be read: {reason or line(error)}") from error


def pictures(file: IO[bytes] | str, kind: str) -> Iterator[Image.Image]:
    """Yield the pictures of a medium, upright, as RGB."""
    if kind == "video":
        with video(file) as container:
            for frame in container.decode(video=0):
                check_whole(frame)
                yield frame.to_image().rotate(frame.rotation, expand=True)
        return
    with image(file) as (picture, turn):
        upright = picture if turn is None else picture.transpose(turn)
        yield upright.convert("RGB")


@contextmanager
def image(
    file: IO[bytes] | str, formats: tuple[str, ...] = IMAGE_FORMATS
) -> Iterator[tuple[Image.Image, Transpose | None]]:
    """Yield the decoded image of a file in one of ``formats``, as stored, and the turn that makes it upright, or None.

    Raises one of ``DAMAGED``, also if it has more than 8 bits a channel.
    """
    try:
        opened = Image.open(file, formats=formats)
    except UnidentifiedImageError as error:
        # Pillow names the open file, with an address that differs each time.
        raise ValueError(f"cannot identify image file; expected one of {', '.join(formats)}") from error
    with opened as picture:
        if picture.mode.startswith(("I", "F")):
            raise ValueError(f"mode {picture.mode}, expected 8 bits a channel")
        picture.load()
        # `ImageOps.exif_transpose` writes the EXIF anew, which fails on what other programs write.
        yield picture, _TURNS.get(picture.getexif().get(_ORIENTATION))


def video(file: IO[bytes] | str) -> InputContainer:
    """Open a video. Raises one of ``DAMAGED`` if it is of no format whose frames are in the file."""
    try:
        return av.open(file, "r", options={"format_whitelist": VIDEO_FORMATS})
    except av.ArgumentError as error:
        raise ValueError(f"{error.strerror}; expected a video in one of the formats {VIDEO_FORMATS}") from error


def check_whole(frame: av.VideoFrame) -> None:
    """Raise ``ValueError`` for a frame in which the decoder made up parts that it could not read."""
    if frame.is_corrupt:
        raise ValueError(f"the frame at {frame.time or 0:g} s is damaged")


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
    if across * down > MOST_SCALED:
        end = (left + width) / scale, (top + height) / scale
        box = left / scale, top / scale, min(end[0], picture.width), min(end[1], picture.height)
        return np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC, box), dtype=np.uint8)
    scaled = picture.resize((across, down), Image.Resampling.BICUBIC)
    return np.asarray(scaled.crop((left, top, left + width, top + height)), dtype=np.uint8)
