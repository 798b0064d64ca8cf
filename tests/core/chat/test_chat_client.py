"""Requests to a service of chats that is busy, away or wrong: what is asked again, and what is no answer."""

import email.utils
import time

import pytest

from cosmos_rl_core.chat.client import RefusedError
from cosmos_rl_core.errors import ConfigError, UnavailableError
from tests.caption_server import CaptionServer, Reply, completion, serving
from tests.core.captioners.test_caption_endpoint import captions, image, server

__all__ = ["server"]


def refusal(server: CaptionServer, reply: Reply) -> RefusedError:
    server.replies = [reply]
    (found,) = captions(server, image())
    assert isinstance(found, RefusedError)
    return found


@pytest.mark.parametrize("status", [0, 408, 429, 500, 502, 503, 529])
def test_a_service_that_is_busy_or_away_is_asked_again(server: CaptionServer, status: int):
    server.replies = [Reply(status, "later")] * 3
    assert captions(server, image()) == ["1 of 30 x 40"]
    assert len(server.asked) == 4


def test_a_service_counts_as_unavailable_after_the_last_try(server: CaptionServer):
    server.replies = [Reply(503, "overloaded")] * 3
    with pytest.raises(UnavailableError, match=r"no answer on 0000 in 3 tries: 503 .overloaded"):
        captions(server, image(), tries=3)
    assert len(server.asked) == 3


def test_a_pause_that_a_service_asks_for_is_kept(server: CaptionServer):
    server.replies = [Reply(429, "slowly", {"Retry-After": "1"})]
    before_s = time.monotonic()
    assert captions(server, image()) == ["1 of 30 x 40"]
    assert time.monotonic() - before_s >= 1


@pytest.mark.parametrize(
    "asked", ["3600", email.utils.formatdate(time.time() + 1e6, usegmt=True)], ids=["seconds", "a date"]
)
def test_a_service_that_asks_for_an_hour_is_unavailable(server: CaptionServer, asked: str):
    server.replies = [Reply(429, "quota", {"Retry-After": asked})]
    with pytest.raises(UnavailableError, match="asks for a pause of"):
        captions(server, image())
    assert len(server.asked) == 1


@pytest.mark.parametrize("asked", ["soon", "-1", "nan", "1e9", "\x00"])
def test_an_invalid_pause_is_ignored(server: CaptionServer, asked: str):
    server.replies = [Reply(429, "", {"Retry-After": asked})]
    assert captions(server, image()) == ["1 of 30 x 40"]


def test_an_answer_that_never_ends_is_given_up(server: CaptionServer):
    server.replies = [Reply(body={}, hangs=True)]
    assert captions(server, image(), timeout_s=0.2) == ["1 of 30 x 40"]
    server.replies = [Reply(body={}, hangs=True)] * 2
    with pytest.raises(UnavailableError, match="ReadTimeout"):
        captions(server, image(), timeout_s=0.1, tries=2)


def test_an_address_without_a_service_is_unavailable():
    with serving() as server:
        pass
    with pytest.raises(UnavailableError, match="in 2 tries: ConnectError"):
        captions(server, image(), tries=2)


@pytest.mark.parametrize(
    ("reply", "reason", "final"),
    [
        (completion("no", refusal="I cannot look at this"), "the model refused: I cannot look at this", True),
        (completion(None, "content_filter"), "the model refused: content_filter", True),
        (completion(""), "the model answered nothing", True),
        (completion(" \n"), "the model answered nothing", True),
        (completion(None), "the model answered nothing", True),
        (completion("A dog that", "length"), "the answer is cut at max_tokens; raise it", True),
        (Reply(400, "bad picture"), "the service answered 400 .bad picture.", False),
        (Reply(413, "x" * 999), r"the service answered 413 .x{199}\.\.\.$", False),
        (Reply(200, b"<html>"), "no completion: 200 <html>", False),
        (Reply(200, {"choices": []}), "no completion", False),
        (Reply(200, {"choices": [{"message": "text"}]}), "no completion", False),
        (Reply(200, b'{"choices":[{"message":{"content":"\\ud800"}}]}'), "no text that can be encoded", True),
        (Reply(200, b"[" * 100000), "no completion", False),
        (Reply(200, {"choices": [{"message": {"content": ["a"]}}]}), "the model answered nothing", True),
    ],
)
def test_an_answer_without_a_caption_never_becomes_one(server: CaptionServer, reply: Reply, reason: str, final: bool):
    found = refusal(server, reply)
    with pytest.raises(RefusedError, match=reason):
        raise found
    assert found.final == final
    assert len(server.asked) == 1


@pytest.mark.parametrize("status", [301, 403, 404, 405, 501])
def test_an_error_that_every_medium_would_meet_ends_the_stage(server: CaptionServer, status: int):
    server.replies = [Reply(status, "no", {"Location": "http://127.0.0.1:9/"})]
    with pytest.raises(ConfigError, match=f"answered {status}"):
        captions(server, *[image()] * 20, concurrency=1)
    assert len(server.asked) < 20
