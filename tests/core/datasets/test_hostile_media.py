"""Media as cameras, tools and broken disks leave them: how they are seen, or why they are refused."""

import io
from fractions import Fraction

import av
import numpy as np
import pytest

from cosmos_rl_core.datasets import _clips, _probe
from cosmos_rl_core.datasets._base import ItemError

STEPS = np.stack([np.full((32, 48, 3), 20 * index, dtype=np.uint8) for index in range(12)])
"""Frames of one grey each, so that a frame's number is read from any of its pixels."""


def h264(pixels: np.ndarray, *, gop: int = 6) -> bytes:
    """An MP4 as most cameras write it."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=24, options={"g": str(gop), "bf": "2", "crf": "5"})
        stream.height, stream.width, stream.pix_fmt = *pixels.shape[1:3], "yuv420p"
        for frame in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


def cut(data: bytes, first: int) -> bytes:
    """Cut off the first frames without encoding again: an edit list hides those since the key frame."""
    buffer = io.BytesIO()
    options = {"avoid_negative_ts": "disabled", "use_editlist": "1"}
    with av.open(io.BytesIO(data), "r") as source, av.open(buffer, "w", format="mp4", options=options) as target:
        old = source.streams.video[0]
        new = target.add_stream_from_template(old)
        assert old.time_base
        shift = int(Fraction(first, 24) / old.time_base)
        for packet in source.demux(old):
            if packet.dts is not None and packet.pts is not None:
                packet.pts, packet.dts, packet.stream = packet.pts - shift, packet.dts - shift, new
                target.mux(packet)
    return buffer.getvalue()


def greys(data: bytes) -> list[int]:
    """The numbers of the frames that are decoded."""
    return [round(int(np.asarray(picture)[0, 0, 0]) / 20) for picture in _clips.pictures(io.BytesIO(data), "video")]


def test_frames_that_a_cut_has_hidden_are_not_counted():
    whole = h264(STEPS)
    assert greys(whole) == list(range(12))
    assert _probe.shape(io.BytesIO(whole), "video") == (32, 48, 12, 24.0)
    for first in (2, 5):
        data = cut(whole, first)
        assert greys(data) == list(range(first, 12))
        assert _probe.shape(io.BytesIO(data), "video").frames == 12 - first


def test_a_frame_that_the_decoder_has_filled_in_is_damage():
    noise = np.random.default_rng(0).integers(0, 256, (4, 64, 96, 3), dtype=np.uint8)
    whole = h264(noise)
    with av.open(io.BytesIO(whole), "r") as container:
        first = next(container.demux(video=0))
    assert first.pos
    middle = first.pos + first.size // 2
    data = whole[:middle] + bytes(64) + whole[middle + 64 :]
    with av.open(io.BytesIO(data), "r") as container:
        assert len(list(container.decode(video=0))) == 4  # FFmpeg itself does not mind
    for read in (lambda file: _probe.shape(file, "video"), lambda file: _clips.read(file, "video", [[0]], (8, 8))):
        with pytest.raises(ItemError, match="cannot be read: the frame at 0 s is damaged"):
            read(io.BytesIO(data))
