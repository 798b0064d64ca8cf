"""Captions of a real HTTP service: what is sent to it, in which order, and which settings are refused."""

import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
from PIL import Image

from cosmos_rl_core.captioners import endpoint
from cosmos_rl_core.captioners._base import Medium
from cosmos_rl_core.chat.client import RefusedError
from cosmos_rl_core.config.train import CaptionerOptions
from cosmos_rl_core.errors import ConfigError
from tests.caption_server import TOKEN, CaptionServer, Reply, serving
from tests.stages.test_index import video


@pytest.fixture
def server() -> Iterator[CaptionServer]:
    with serving() as server:
        yield server
    assert server.mistakes == []


def image(height: int = 30, width: int = 40) -> Medium:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(buffer, "PNG")
    return Medium("0000", "image", 1, partial(io.BytesIO, buffer.getvalue()))


def options_of(server: CaptionServer, **settings: Any) -> endpoint.Options:
    values = {"by": "endpoint", "url": server.url, "model": "vlm", "instruction": "Describe it.", "pause_s": 0.001}
    return endpoint.Options.model_validate(values | settings)


def captions(server: CaptionServer, *media: Medium, **settings: Any) -> list[str | RefusedError]:
    return list(endpoint.Captioner(options_of(server, **settings), {"CAPTION_TOKEN": TOKEN}).captions(media))


def test_an_image_goes_with_the_instruction_and_the_answer_is_its_caption(server: CaptionServer):
    assert captions(server, image(), max_tokens=77) == ["1 of 30 x 40"]
    (asked,) = server.asked
    assert (asked.model, asked.instruction) == ("vlm", "Describe it.")
    assert asked.settings == {"max_tokens": 77, "temperature": 0.0}
    pixel = cast("tuple[int, ...]", asked.pictures[0].getpixel((5, 5)))
    assert all(abs(found - expected) < 5 for found, expected in zip(pixel, (200, 30, 30), strict=True))


def test_large_pictures_are_scaled_down(server: CaptionServer):
    assert captions(server, image(300, 600), max_side=100) == ["1 of 50 x 100"]


def test_evenly_spaced_frames_of_a_video_are_sent(server: CaptionServer, tmp_path: Path):
    video(tmp_path / "a.mp4", 0, 10)

    def opened() -> BinaryIO:
        return (tmp_path / "a.mp4").open("rb")

    assert captions(server, Medium("a", "video", 10, opened), num_frames=4) == ["4 of 32 x 48"]
    assert captions(server, Medium("a", "video", 10, opened), num_frames=40) == ["10 of 32 x 48"]


def test_captions_come_in_order_with_a_bounded_number_at_once(server: CaptionServer):
    media = [image(20 + number) for number in range(24)]
    assert captions(server, *media, concurrency=3) == [f"1 of {20 + number} x 40" for number in range(24)]
    assert server.most_at_once <= 3


def test_the_token_of_the_named_variable_is_sent_and_never_shown(server: CaptionServer):
    server.token = TOKEN
    assert captions(server, image(), token_variable="CAPTION_TOKEN") == ["1 of 30 x 40"]
    server.replies = [Reply(401, f"no {TOKEN}")]
    with pytest.raises(ConfigError, match=r"401 .*<token>.*token_variable") as error:
        captions(server, image(), token_variable="CAPTION_TOKEN")
    assert TOKEN not in str(error.value)
    with pytest.raises(ConfigError, match="CAPTION_OTHER is not set"):
        endpoint.Captioner(options_of(server, token_variable="CAPTION_OTHER"), {}).check()
    with pytest.raises(ConfigError, match="not a token that a header can hold"):
        endpoint.Captioner(options_of(server, token_variable="CAPTION_A"), {"CAPTION_A": "a\nb"}).check()


def test_a_medium_that_cannot_be_decoded_is_not_sent(server: CaptionServer):
    (found,) = captions(server, Medium("0000", "image", 1, partial(io.BytesIO, b"GIF8")))
    assert isinstance(found, RefusedError)
    assert "cannot be read" in str(found)
    assert server.asked == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"url": "ftp://host/v1"}, "is no http"),
        ({"url": "http://user:word@host/v1"}, "name a token by token_variable"),
        ({"url": "http://host/v1?key=1"}, "name a token by token_variable"),
        ({"token_variable": "PATH"}, "token_variable"),
        ({"concurrency": 0}, "concurrency"),
        ({"instruction": ""}, "instruction"),
    ],
)
def test_mistakes_of_the_settings_are_refused(settings: dict[str, Any], expected: str):
    with pytest.raises(ValueError, match=expected):
        options_of(CaptionServer(url="http://host/v1"), **settings)


def test_address_and_pace_of_requests_are_no_part_of_the_identity():
    one, other = CaptionServer(url="http://a/v1"), CaptionServer(url="https://b/v1")
    place = {"concurrency": 2, "timeout_s": 1.0, "tries": 2, "token_variable": "CAPTION_TOKEN"}
    ours, theirs = options_of(one), options_of(other, **place)
    assert ours.identity() == theirs.identity()
    assert ours.identity() != options_of(one, instruction="In one line.").identity()
    assert isinstance(ours, CaptionerOptions)
