"""Pictures of a medium as JPEG, for services and people that look at them."""

import io
from collections.abc import Iterator
from typing import BinaryIO

from PIL import Image

from cosmos_rl_core.datasets import _clips
from cosmos_rl_core.datasets._base import ItemError

QUALITY = 90


def pictures(file: BinaryIO, kind: str, frames: int, *, num_frames: int, max_side: int) -> list[bytes]:
    """Return an image, or evenly spaced frames of a video of ``frames``, no side longer than ``max_side``, as JPEG.

    ``file`` is a local copy: an error of reading it counts as damage. Raises :class:`ItemError` if nothing can be
    decoded.
    """
    with _clips.damage():
        found = _frames(file, frames, num_frames) if kind == "video" else _clips.pictures(file, kind)
        made = [_jpeg(picture, max_side) for picture in found]
    if not made:
        raise ItemError("no frame can be decoded")
    return made


def _frames(file: BinaryIO, total: int, count: int) -> Iterator[Image.Image]:
    """Yield the middles of ``count`` equal parts of a video, fewer if it is shorter."""
    count = min(count, total)
    wanted = {(2 * part + 1) * total // (2 * count) for part in range(count)}
    with _clips.video(file) as container:
        for number, frame in enumerate(container.decode(video=0)):
            if number in wanted:
                yield frame.to_image().rotate(frame.rotation, expand=True)
            if number >= max(wanted):
                break


def _jpeg(picture: Image.Image, max_side: int) -> bytes:
    picture.thumbnail((max_side, max_side))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()
