"""Images and videos as pixels. Of a video's file, only the frames that are asked for are kept."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from cosmos_rl_core.datasets import _clips
from cosmos_rl_core.datasets._base import ItemError
from cosmos_rl_core.vlms._base import Clip

Source = np.ndarray | str | Path | BinaryIO
"""uint8 RGB pixels, or a file: its path, or an open binary file that can seek."""
Sample = Callable[[int, float], Sequence[int]]
"""Function from a video's number of frames and frames per second to the indices of the frames to take, in order."""


def image(source: Source) -> Clip:
    """Return an image as a clip of one frame. Transparent parts are white, as in transformers.

    Raises :class:`ItemError` with the reason if it cannot be used.
    """
    pixels = _checked(source, "image") if isinstance(source, np.ndarray) else _read(_image, source)
    if len(pixels) != 1:
        raise ItemError(f"an image of {len(pixels)} frames, expected 1; give it as a video")
    return Clip(pixels, (0,), 1, 1.0)


def video(source: Source, fps: float | None, sample: Sample) -> Clip:
    """Return the frames of a video that ``sample`` names.

    Pixels ``[frames, height, width, 3]`` need ``fps``; a file has its own. Raises :class:`ItemError` with the reason if
    the video cannot be used.
    """
    if not isinstance(source, np.ndarray):
        if fps is not None:
            raise ItemError(f"fps = {fps} given with a file; leave it out, the file has its own")
        return _read(lambda file: _video(file, sample), source)
    pixels = _checked(source, "video")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < float("inf"):
        raise ItemError(f"a video of pixels has fps = {fps!r}, expected the frames per second, above 0")
    indices = tuple(sample(len(pixels), float(fps)))
    return Clip(pixels[list(indices)], indices, len(pixels), float(fps))


def _checked(pixels: np.ndarray, kind: str) -> np.ndarray:
    """Return uint8 RGB ``[frames, height, width, 3]``; an image may lack the first axis."""
    frames = pixels[None] if kind == "image" and pixels.ndim == 3 else pixels
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or 0 in frames.shape:
        axes = "[height, width, 3]" if kind == "image" else "[frames, height, width, 3]"
        raise ItemError(f"pixels are {pixels.dtype} {list(pixels.shape)}, expected uint8 {axes}")
    return frames


def _read(reader: Callable[[Any], Any], source: str | Path | BinaryIO) -> Any:
    if not isinstance(source, str | Path) and not hasattr(source, "read"):
        raise ItemError(f"found {type(source).__name__}, expected pixels as an array, a path, or a file")
    name = f"{source}: " if isinstance(source, str | Path) else ""
    try:
        with _clips.damage():
            return reader(str(source) if isinstance(source, Path) else source)
    except ItemError as error:
        raise ItemError(f"{name}{error}") from error


def _image(file: str | BinaryIO) -> np.ndarray:
    with _clips.image(file) as (opened, turn):
        turned = opened if turn is None else opened.transpose(turn)
        if turned.has_transparency_data:
            over = turned.convert("RGBA")
            turned = Image.alpha_composite(Image.new("RGBA", over.size, (255, 255, 255, 255)), over)
        return np.asarray(turned.convert("RGB"))[None]


def _video(file: str | BinaryIO, sample: Sample) -> Clip:
    with _clips.video(file) as container:
        if not container.streams.video:
            raise ItemError("it has no video stream")
        rate = container.streams.video[0].average_rate
        if not rate:
            raise ItemError("its frame rate is unknown")
        # Counted without decoding: a packet is a frame. The number in the header is 0 in some formats.
        total = sum(packet.size > 0 for packet in container.demux(video=0))
        indices = tuple(sample(total, float(rate)))
        container.seek(0)
        wanted, frames = set(indices), {}
        for number, frame in enumerate(container.decode(video=0)):
            if number in wanted:
                frames[number] = np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)
            if len(frames) == len(wanted):
                break
    if missing := sorted(wanted - frames.keys()):
        raise ItemError(f"frame {missing[0]} of {total} cannot be decoded")
    return Clip(np.stack([frames[number] for number in indices]), indices, total, float(rate))
