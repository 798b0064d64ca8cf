"""Lossless files of pixels: PNG for an image, FFV1 in Matroska for a video."""

import io

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


def _encode_video(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    # bitexact leaves the random segment id and the library's version out of the file.
    with av.open(buffer, "w", format="matroska", options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream("ffv1", rate=FPS, options={"flags": "+bitexact"})
        _, stream.height, stream.width, _ = pixels.shape
        stream.pix_fmt = "bgr0"
        for frame in pixels:
            packet_source = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            container.mux(stream.encode(packet_source))
        container.mux(stream.encode())
    return buffer.getvalue()
