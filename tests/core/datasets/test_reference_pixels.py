"""Pixels of references: whole pictures as they are shown, and the ends of whole clips."""

import io
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from cosmos_rl_core.datasets._reference_pixels import CLIP_FRAMES, decoded
from cosmos_rl_core.storage.media import encode


def noise(frames: int, size: tuple[int, int] = (20, 30)) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (frames, *size, 3), dtype=np.uint8)


def saved(picture: Image.Image, name: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format=name, **options)
    return buffer.getvalue()


def clip(extension: str, codec: str, frames: int) -> bytes:
    """Frames of one grey each, 10 more in each next one."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=extension) as container:
        stream: Any = container.add_stream(codec, rate=Fraction(8))
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(frames):
            grey = np.full((48, 64, 3), 10 * (number + 1), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        container.mux(stream.encode(None))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("extension", "codec"), [("matroska", "ffv1"), ("matroska", "mpeg4"), ("mp4", "mpeg4"), ("avi", "mpeg4")]
)
def test_a_clip_is_its_last_frames_whatever_holds_them(extension: str, codec: str):
    found = decoded(clip(extension, codec, 9))
    assert found.shape == (CLIP_FRAMES, 48, 64, 3)
    assert found.mean((1, 2, 3)) == pytest.approx([50, 60, 70, 80, 90], abs=5)


@pytest.mark.parametrize("codec", ["ffv1", "mpeg4"])
@pytest.mark.parametrize("extension", ["matroska", "mp4"])
def test_a_clip_that_was_cut_off_is_refused_or_has_all_its_frames(extension: str, codec: str):
    """Frames before the cut can be decoded, and would be another end."""
    data, refused = clip(extension, codec, 20), 0
    whole = decoded(data)
    for kept in np.linspace(len(data) // 4, len(data) - 1, 40).astype(int):
        try:
            assert np.array_equal(decoded(data[:kept]), whole), kept
        except ValueError:
            refused += 1
    assert refused > 10


def test_a_clip_of_which_one_frame_is_missing_at_the_end_is_refused():
    data, frames = encode(noise(9))[1], 9
    whole = decoded(data)
    assert np.array_equal(whole, noise(frames)[-CLIP_FRAMES:])
    # A block of FFV1 is nearly as long as the pixels of noise.
    with pytest.raises(ValueError, match="cannot be decoded: it is cut off or damaged"):
        decoded(data[: len(data) - 20 * 30 * 3 // 2])


def test_a_picture_is_turned_as_it_is_shown_whatever_else_its_exif_says():
    picture, exif = Image.fromarray(noise(1)[0]), Image.Exif()
    exif[0x0112] = 6
    expected = picture.transpose(Image.Transpose.ROTATE_270)
    # A width as a negative signed number, which Pillow cannot write again.
    entries = struct.pack("<HHIi", 0x0100, 9, 1, -3) + struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0)
    block = b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", 2) + entries + bytes(4)
    strange = saved(picture, "PNG", exif=b"Exif\0\0" + block)
    assert np.array_equal(decoded(strange)[0], np.asarray(expected))
    assert np.array_equal(decoded(saved(picture, "PNG", exif=exif))[0], np.asarray(expected))


def test_the_first_picture_of_several_in_a_jpeg_is_taken():
    pictures = [Image.fromarray(np.full((16, 16, 3), grey, np.uint8)) for grey in (200, 10)]
    data = saved(pictures[0], "MPO", save_all=True, append_images=pictures[1:])
    assert decoded(data).mean() == pytest.approx(200, abs=2)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (lambda: saved(Image.fromarray(np.full((8, 8), 60_000, np.uint16)), "PNG"), "expected 8 bits a channel"),
        (lambda: saved(Image.fromarray(np.full((8, 8), 0.5, np.float32)), "TIFF"), "expected 8 bits a channel"),
        (lambda: saved(Image.new("RGB", (8, 8)), "EPS"), "no picture and no clip that can be decoded; expected one of"),
        (lambda: b"%PDF-1.7 no picture", "no picture and no clip that can be decoded; expected one of JPEG, PNG"),
        (lambda: saved(Image.fromarray(noise(1)[0]), "PNG")[:-400], "cannot be read"),
    ],
    ids=["16 bits", "floats", "a program", "a document", "cut off"],
)
def test_other_bytes_are_refused_with_what_is_expected(data: Callable[[], bytes], said: str):
    with pytest.raises(ValueError, match=said):
        decoded(data())
