"""Lossless files of pixels: PNG for an image, FFV1 in Matroska for a video; and videos for browsers."""

import io
from typing import Any

import av
import numpy as np
from PIL import Image

IMAGE, VIDEO = "png", "mkv"
FPS = 16
"""Frames per second written into videos."""


def encode(pixels: np.ndarray) -> tuple[str, bytes]:
    """Return extension and bytes of a file for uint8 RGB ``[frames, height, width, 3]``.

    One frame gives an image, several a video. Equal pixels give equal bytes.
    """
    if len(pixels) == 1:
        buffer = io.BytesIO()
        Image.fromarray(pixels[0]).save(buffer, format="PNG")
        return IMAGE, buffer.getvalue()
    return VIDEO, _encode_video(pixels)


def decode(extension: str, data: bytes) -> np.ndarray:
    """Return uint8 RGB ``[frames, height, width, 3]`` from a file of :func:`encode`."""
    if extension == IMAGE:
        return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))[None]
    with av.open(io.BytesIO(data), "r") as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def playable(pixels: np.ndarray) -> bytes:
    """Return an MP4 with H.264 of uint8 RGB ``[frames, height, width, 3]``, which browsers play. It is not lossless.

    An odd height or width gets its last row or column twice. Equal pixels give equal bytes.
    """
    _, height, width, _ = pixels.shape
    pixels = np.pad(pixels, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    # One thread: how frames are divided between threads changes the bits. x264's tree of macroblocks reads memory of
    # small pictures that it has not written.
    codec = {"crf": "20", "preset": "veryfast", "threads": "1", "mbtree": "0", "flags": "+bitexact"}
    return _write(pixels, "mp4", {"fflags": "+bitexact"}, "libx264", "yuv420p", codec)


def _encode_video(pixels: np.ndarray) -> bytes:
    # bitexact leaves the random segment id and the library's version out of the file.
    return _write(pixels, "matroska", {"fflags": "+bitexact"}, "ffv1", "bgr0", {"flags": "+bitexact"})


def _write(
    pixels: np.ndarray, container: str, options: dict[str, str], codec: str, pix_fmt: str, settings: dict[str, str]
) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container, options=options) as file:
        stream: Any = file.add_stream(codec, rate=FPS, options=settings)
        _, stream.height, stream.width, _ = pixels.shape
        stream.pix_fmt = pix_fmt
        for frame in pixels:
            packet_source = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            file.mux(stream.encode(packet_source))
        file.mux(stream.encode())
    return buffer.getvalue()
