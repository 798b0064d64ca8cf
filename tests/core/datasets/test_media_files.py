"""Media of others: what is decoded, how it is turned, and files that would open or start something else."""

import io
import struct
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image, ImageOps

from cosmos_rl_core.datasets import _clips, _pictures, _probe
from cosmos_rl_core.datasets._base import ItemError

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 10, 3), dtype=np.uint8)
TIFF, SHORT, DOUBLE = b"II*\0", 3, 12


def exif_of(*entries: tuple[int, int, bytes]) -> bytes:
    """EXIF with one value of a tag and type in each entry; of a value of eight bytes the place, at the end."""
    end = 8 + 2 + 12 * len(entries) + 4
    rows, after = b"", b""
    for tag, kind, value in entries:
        inside = value.ljust(4, b"\0") if len(value) <= 4 else struct.pack("<I", end + len(after))
        rows, after = rows + struct.pack("<HHI", tag, kind, 1) + inside, after + value * (len(value) > 4)
    return b"Exif\0\0" + TIFF + struct.pack("<IH", 8, len(entries)) + rows + bytes(4) + after


def image(**options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(PIXELS).save(buffer, "PNG", **options)
    return buffer.getvalue()


def video(frames: int, container_format: str = "mp4", **options: str) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container_format, options=options) as container:
        stream = container.add_stream("libx264", rate=5)
        stream.height, stream.width, stream.pix_fmt = 16, 32, "yuv420p"
        container.start_encoding()
        for _ in range(frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((16, 32, 3), np.uint8), format="rgb24")))
        if frames:
            container.mux(stream.encode(None))
    return buffer.getvalue()


def seen(data: bytes, kind: str) -> list[object]:
    """What the index, the encoding and the captioners make of a medium: a size each."""
    facts = _probe.probe(io.BytesIO(data), kind)
    (clip,) = _clips.read(io.BytesIO(data), kind, [[0]], (facts.height, facts.width))
    (jpeg,) = _pictures.pictures(io.BytesIO(data), kind, facts.frames, num_frames=1, max_side=64)
    return [(facts.height, facts.width), clip.shape[1:3], Image.open(io.BytesIO(jpeg)).size[::-1]]


def refusals(data: bytes, kind: str) -> set[str]:
    """Why the index, the encoding and the captioners refuse a medium."""
    found = set[str]()
    for use in (
        lambda file: _probe.probe(file, kind),
        lambda file: _clips.read(file, kind, [[0]], (16, 16)),
        lambda file: _pictures.pictures(file, kind, 1, num_frames=1, max_side=64),
    ):
        with pytest.raises(ItemError) as caught:
            use(io.BytesIO(data))
        found.add(str(caught.value))
    return found


@pytest.mark.parametrize("orientation", range(10))
def test_an_image_is_turned_as_its_file_says(orientation: int):
    data = image(exif=exif_of((0x0112, SHORT, struct.pack("<H", orientation))))
    (found,) = _clips.pictures(io.BytesIO(data), "image")
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert np.array_equal(np.asarray(found), np.asarray(expected))
    assert seen(data, "image") == [expected.size[::-1]] * 3


def test_an_image_whose_other_facts_cannot_be_written_again_is_used():
    data = image(exif=exif_of((0x0112, SHORT, b"\6\0"), (0x0118, DOUBLE, struct.pack("<d", 1.5))))
    with pytest.raises(struct.error):
        ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert seen(data, "image") == [(10, 6)] * 3


def test_an_image_with_more_than_8_bits_is_refused_when_it_is_indexed():
    buffer = io.BytesIO()
    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(buffer, "PNG")
    assert refusals(buffer.getvalue(), "image") == {"cannot be read: mode I;16, expected 8 bits a channel"}


def test_no_program_is_started_for_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started = tmp_path / "started"
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {started}\n", encoding="utf-8")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
    said = "cannot be read: cannot identify image file; expected one of JPEG, PNG, WEBP, GIF, BMP"
    assert refusals(eps, "image") == {said}
    assert not started.exists()


@pytest.mark.parametrize("container_format", ["mp4", "mov", "matroska", "avi", "mpegts"])
def test_a_video_is_read_whatever_its_extension(container_format: str):
    assert seen(video(3, container_format), "video") == [(16, 32)] * 3


@pytest.mark.parametrize(
    "playlist",
    [
        "ffconcat version 1.0\nfile other.mp4\n",
        "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nother.mp4\n#EXT-X-ENDLIST\n",
        "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n",
    ],
    ids=["concat", "hls", "sdp"],
)
def test_a_video_opens_no_other_file_and_waits_for_no_stream(
    playlist: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "other.mp4").write_bytes(video(1))
    monkeypatch.chdir(tmp_path)
    (reason,) = refusals(playlist.encode(), "video")
    assert reason.startswith("cannot be read: Invalid ")


def test_a_video_without_a_frame_is_refused():
    (reason, *_) = sorted(refusals(video(0, movflags="frag_keyframe+empty_moov+default_base_moof"), "video"))
    assert reason == "0 frames can be decoded, expected 1"


def test_of_a_thin_strip_only_the_middle_is_scaled(monkeypatch: pytest.MonkeyPatch):
    rows = np.random.default_rng(0).integers(0, 256, (40, 3, 3), np.uint8)
    for strip in (Image.fromarray(rows), Image.fromarray(rows.transpose(1, 0, 2))):
        whole = _clips.fit(strip, (16, 24))
        with monkeypatch.context() as patched:
            patched.setattr(_clips, "MOST_SCALED", 0)
            found = _clips.fit(strip, (16, 24))
        # Pixels at the cut have neighbours in one of both only.
        apart = np.abs(found.astype(int) - whole)
        assert apart.mean() < 8, apart.mean()
        assert apart[4:-4, 4:-4].max() < 16, apart[4:-4, 4:-4].max()
    # Whole it would have 10^11 pixels.
    assert _clips.fit(Image.new("RGB", (1, 100_000), "red"), (1024, 1024)).tolist()[0][0] == [255, 0, 0]
