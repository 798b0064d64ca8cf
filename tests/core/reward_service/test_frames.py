"""Frames are read exactly as the protocol's page writes them, and nonsense is refused with a sentence."""

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos_rl_core.reward_service import frames
from cosmos_rl_core.rewards._geneval.rule import tags_of
from cosmos_rl_core.rewards._remote import frame as ours
from tests.upstream_client import frame

IMAGE = frame(
    ["a cat", "caf\u00e9\nlight"],
    {"pickscore": 1.0},
    np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3),
    media_type="image",
)
LATENTS = frame(
    ["a cat"],
    {"dance_grpo": 1.0},
    np.zeros((1, 16, 2, 2, 2), np.float16),
    video_infos=[{"video_fps": 16.0}],
    media_type="latent",
)


def read(tmp_path: Path, body: bytes) -> frames.Frame:
    (tmp_path / "frame").write_bytes(body)
    return frames.read(tmp_path / "frame")


def written(about: Any, array: np.ndarray | bytes = b"") -> bytes:
    data = io.BytesIO()
    if isinstance(array, np.ndarray):
        np.save(data, array)
    line = about if isinstance(about, bytes) else json.dumps(about).encode()
    return line + b"\n" + (data.getvalue() or bytes(array))


def test_golden_frames_have_the_bytes_of_the_protocols_page():
    assert [(len(body), hashlib.sha256(body).hexdigest()) for body in (IMAGE, LATENTS)] == [
        (251, "ca2a55768cbc1c3f79478896f3c88bf8371a61d7611483a5ae3c3a622edbb96b"),
        (503, "001c95d9eab461b26e450a2f02e07bbc1b1870acd9b1d9c632f192e852ee3e49"),
    ]


def test_a_golden_image_frame_is_read(tmp_path: Path):
    found = read(tmp_path, IMAGE)
    assert (found.prompts, found.rewards, found.media) == (("a cat", "café\nlight"), ("pickscore",), "image")
    assert np.array_equal(found.array(tmp_path / "frame"), np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3))


def test_a_golden_frame_of_latents_is_read(tmp_path: Path):
    found = read(tmp_path, LATENTS)
    assert (found.media, found.shape, found.dtype) == ("latent", (1, 16, 2, 2, 2), np.float16)
    assert found.metadata == ({"video_fps": 16.0},)
    assert found.fps == (16.0,)


def test_the_frames_of_our_client_are_read(tmp_path: Path):
    video = np.zeros((1, 3, 5, 8, 8), np.uint8)
    found = read(tmp_path, ours.frame(["a"], "video_align", "video", video, 16.0))
    assert (found.media, found.shape, found.rewards) == ("video", (1, 3, 5, 8, 8), ("video_align",))


@pytest.mark.parametrize("media_type", [None, "LATENT", "what"])
def test_absent_or_unknown_media_are_latents(tmp_path: Path, media_type: str | None):
    body = frame(["a"], {"x": 1}, np.zeros((1, 48, 2, 4, 4), np.float32), media_type=media_type)
    assert read(tmp_path, body).media == "latent"


def test_an_array_in_fortran_order_is_read_as_it_is(tmp_path: Path):
    array = np.asfortranarray(np.arange(24, dtype=np.uint8).reshape(1, 2, 4, 3))
    assert np.array_equal(
        read(tmp_path, frame(["a"], {"x": 1}, array, media_type="Image")).array(tmp_path / "frame"), array
    )


def test_rewards_of_weight_0_are_not_asked_for(tmp_path: Path):
    body = frame(["a"], {"x": 0, "y": 2, "z": -1.0}, np.zeros((1, 2, 2, 3), np.uint8), media_type="image")
    assert read(tmp_path, body).rewards == ("y",)


def test_facts_of_each_prompt_reach_its_sample(tmp_path: Path):
    body = frame(
        ["a", "b"],
        {"x": 1},
        np.zeros((2, 2, 2, 3), np.uint8),
        media_type="image",
        metadata=[{"tag": "counting"}, {"note": 1}],
        geneval_tags=["counting", "colors"],
        geneval_includes=[[{"class": "dog", "count": 2}], [{"class": "cup", "count": 1, "color": "red"}]],
        geneval_only_strict=True,
    )
    first, second = read(tmp_path, body).metadata
    assert first == {"tag": "counting", "include": [{"class": "dog", "count": 2}]}
    assert second == {"note": 1, "tag": "colors", "include": [{"class": "cup", "count": 1, "color": "red"}]}
    assert [tags_of(one).include[0].kind for one in (first, second)] == ["dog", "cup"]


PIXELS = np.zeros((1, 2, 2, 3), np.uint8)
ABOUT = {"prompts": ["a"], "reward_fn": {"x": 1.0}, "media_type": "image"}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "no newline"),
        (b"{}" * 2**22, "no newline in the first"),
        (b"not json\n", "no JSON"),
        (b"[1]\n", "no JSON object"),
        (b"[" * 100_000 + b"\n", "nested too deeply"),
        (written(ABOUT | {"metadata": [{"x": json.loads("[" * 64 + "]" * 64)}]}, PIXELS), "nested too deeply"),
        (written(b'{"prompts": ["\\ud800"]}'), "no JSON"),
        (written(b'{"a": NaN}'), "NaN is no JSON number"),
        (written(b'{"a": Infinity}'), "Infinity is no JSON number"),
        (written(b'{"a": [-1e999]}'), "-1e999 is larger than any float"),
        (written(b'{"a": ' + b"1" * 5000 + b"}"), "no JSON"),
        (written(ABOUT, b""), "expected an .npy file"),
        (written(ABOUT, b"PK\x03\x04 a zip of torch"), "pickles are not read"),
        (written(ABOUT, b"\x80\x02}q\x00."), "pickles are not read"),
        (written(ABOUT, b"\x93NUMPY\x02\x00" + b"\xff" * 100), "version 1.0"),
        (written(ABOUT, b"\x93NUMPY\x01\x00\xff\xff{"), "header"),
        (written(ABOUT, b"\x93NUMPY\x01\x00\x05\x00((((("), "header"),
        (written(ABOUT, np.array([[None]])), "an array of object; expected numbers"),
        (written(ABOUT, np.array(["text"])), "expected numbers"),
        (written(ABOUT, PIXELS)[:-1], "11 bytes after the array's header"),
        (written(ABOUT, PIXELS) + b"x", "13 bytes after the array's header"),
        (written(ABOUT, PIXELS.astype(np.float32)), "image as float32"),
        (written(ABOUT, PIXELS[..., :2].copy()), "image as uint8 [1, 2, 2, 2]"),
        (written(ABOUT, PIXELS[:0].copy()), "image as uint8 [0, 2, 2, 3]"),
        (written(ABOUT | {"media_type": "video"}, PIXELS), "video as uint8"),
        (written(ABOUT | {"media_type": "latent"}, np.zeros((1, 4, 1, 2, 2), np.float16)), "latent as float16"),
        (written(ABOUT | {"media_type": "latent"}, np.zeros((1, 16, 1, 2, 3), np.uint8)), "latent as uint8"),
        (written(ABOUT | {"media_type": "latent"}, np.zeros((1, 16, 1, 2, 2), np.longdouble)), "at most 8 bytes"),
        (written(ABOUT | {"media_type": "latent"}, np.zeros((1, 16, 1, 2, 2), ">f4")), "byte order"),
        (written(ABOUT | {"prompts": []}, PIXELS), "0 prompts for 1 samples"),
        (written(ABOUT | {"prompts": [7]}, PIXELS), "prompts: expected a list of texts"),
        (written(ABOUT | {"prompts": "a"}, PIXELS), "prompts: expected a list of texts"),
        (written(ABOUT | {"reward_fn": {}}, PIXELS), "no reward has a weight above 0"),
        (written(ABOUT | {"reward_fn": ["x"]}, PIXELS), "reward_fn: expected an object"),
        (written(ABOUT | {"reward_fn": {"x": "1"}}, PIXELS), "reward_fn: expected an object"),
        (written(ABOUT | {"video_infos": [1]}, PIXELS), "video_infos: expected a list of 1 objects"),
        (written(ABOUT | {"video_infos": [{"video_fps": 0}]}, PIXELS), "video_infos: video_fps = 0; expected frames"),
        (written(ABOUT | {"video_infos": [{"video_fps": "24"}]}, PIXELS), "video_infos: video_fps = 24; expected"),
        (written(ABOUT | {"geneval_tags": "counting"}, PIXELS), "geneval_tags: expected a list of 1"),
        (written(ABOUT | {"metadata": [{}, {}]}, PIXELS), "metadata: expected a list of 1 objects"),
        (written(ABOUT | {"scorers": {"x": 1}}, PIXELS), "scorers: expected an object"),
    ],
    ids=lambda value: f"{len(value)} bytes" if isinstance(value, bytes) else value,
)  # fmt: skip
def test_bytes_that_are_no_frame_are_refused_with_a_sentence(tmp_path: Path, body: bytes, sentence: str):
    with pytest.raises(frames.FrameError) as refused:
        read(tmp_path, body)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ("(4294967296, 4294967296, 4, 3)", "bytes after the array's header"),
        ("(1, -2, -2, 3)", "expected no number below 0"),
    ],
)
def test_a_frame_with_an_impossible_shape_is_refused(tmp_path: Path, shape: str, sentence: str):
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    array = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(12)
    with pytest.raises(frames.FrameError, match=sentence):
        read(tmp_path, written(ABOUT, array))
