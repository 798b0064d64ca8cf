"""Pixels of references, from the bytes of their files: whole pictures, and the ends of whole clips."""

import io
from collections import deque
from datetime import timedelta
from typing import Any

import av
import numpy as np
from av.container import InputContainer
from PIL import Image, UnidentifiedImageError

from cosmos_rl_core.datasets import _clips
from cosmos_rl_core.datasets._base import ItemError

MOST_BYTES, MOST_PIXELS = 64 * 2**20, 2**26
"""Most bytes of a file, and most pixels of its picture or of one frame of its clip."""
CLIP_FRAMES = 5
"""Number of frames read from the end of a clip: two latent frames of VAEs that compress each four after the first."""
PICTURE_FORMATS = (*_clips.IMAGE_FORMATS, "TIFF", "AVIF")
"""Formats of pictures. The first picture is taken from a JPEG that has further ones in it (MPO)."""


def decoded(data: bytes) -> np.ndarray:
    """Return the picture or the end of the clip in the bytes of a file: uint8 RGB ``[frames, height, width, 3]``.

    Pictures are turned upright, and transparent parts become white. A picture is one frame; of a clip, the last
    :data:`CLIP_FRAMES` frames are read. Raises ``ValueError`` unless the bytes are one whole picture or clip of usual
    size. A clip is whole if its frames last as long as its file states; MPEG streams state no length.
    """
    if len(data) > MOST_BYTES:
        raise ValueError(f"{len(data) / 2**20:.0f} MiB, at most {MOST_BYTES // 2**20} are taken; make the file smaller")
    try:
        with _clips.damage():
            return _picture(data) if _is_picture(data) else _end_of_clip(data)
    except ItemError as error:
        raise ValueError(str(error)) from error


def _is_picture(data: bytes) -> bool:
    """Return whether Pillow knows the format. Raises ``ValueError`` for bytes that are no clip either."""
    try:
        with Image.open(io.BytesIO(data), formats=PICTURE_FORMATS) as picture:
            _check_size(picture)
            frames = getattr(picture, "n_frames", 1)
            if frames > 1 and picture.format != "MPO":
                raise ItemError(f"an animation of {frames} pictures; expected one picture, such as PNG")
            return True
    except UnidentifiedImageError:
        try:
            _clips.video(io.BytesIO(data)).close()
        except (*_clips.DAMAGED, av.FFmpegError) as error:
            formats = f"{', '.join(PICTURE_FORMATS)}; {_clips.VIDEO_FORMATS}"
            raise ItemError(f"no picture and no clip that can be decoded; expected one of {formats}") from error
        return False


def _picture(data: bytes) -> np.ndarray:
    with _clips.image(io.BytesIO(data), PICTURE_FORMATS) as (picture, turn):
        upright = picture if turn is None else picture.transpose(turn)
        return np.asarray(_opaque(upright))[None]


def _end_of_clip(data: bytes) -> np.ndarray:
    last, count, end_s = deque[Image.Image](maxlen=CLIP_FRAMES), 0, 0.0
    with _clips.video(io.BytesIO(data)) as container:
        stream: Any = next(iter(container.streams.video), None)
        if stream is None or stream.codec_context is None:
            raise ItemError("a file without a video stream that can be decoded")
        frame_s = float(1 / stream.average_rate) if stream.average_rate else 0.0
        for frame in container.decode(stream):
            _clips.check_whole(frame)
            picture = frame.to_image().rotate(frame.rotation, expand=True)
            _check_size(picture)
            last.append(picture)
            count += 1
            end_s = (frame.time or 0.0) + (float(frame.duration * frame.time_base) if frame.duration else frame_s)
        missing_s = (_declared_end_s(container, stream) or end_s) - end_s
    if missing_s > max(frame_s / 2, 1e-3):
        raise ItemError(f"a clip whose last {missing_s:.3g} s cannot be decoded: it is cut off or damaged")
    if count < CLIP_FRAMES:
        raise ItemError(f"a clip of {count} frames; expected {CLIP_FRAMES} or more; the last ones are taken")
    return np.stack([np.asarray(frame) for frame in last])


def _declared_end_s(container: InputContainer, stream: Any) -> float | None:
    """Return the time in seconds at which the stream ends, as its file states it; None if the file does not."""
    if stream.duration is not None:
        return float((stream.duration + (stream.start_time or 0)) * stream.time_base)
    if (told := stream.metadata.get("DURATION")) is not None:
        hours, minutes, seconds = map(float, told.split(":"))
        return timedelta(hours=hours, minutes=minutes, seconds=seconds).total_seconds()
    if container.duration is not None and len(container.streams) == 1:
        return (container.duration + (container.start_time or 0)) / av.time_base
    return None


def _check_size(picture: Image.Image) -> None:
    if picture.width * picture.height > MOST_PIXELS:
        size = f"{picture.height} x {picture.width} pixels"
        raise ItemError(f"{size}, at most {MOST_PIXELS} are taken; make it smaller")


def _opaque(picture: Image.Image) -> Image.Image:
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    picture = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
