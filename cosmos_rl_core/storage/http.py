"""Files at http(s) URLs: their stamps, and copies of them. Failures that may pass are retried for a limited time."""

import os
import random
import time
from collections.abc import Callable
from functools import cache
from typing import BinaryIO, TypeVar

import httpx

from cosmos_rl_core.errors import ConfigError, UnavailableError
from cosmos_rl_core.http_client import client, without_secrets

RETRY_FOR_S = 60.0
"""Seconds without a further byte after which a file counts as unavailable."""
FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 10.0
TIMEOUT = httpx.Timeout(30.0, connect=5.0)

_PASSING = frozenset({408, 425, 429})
"""Statuses below 500 after which the same request may succeed."""
_NEVER = (httpx.LocalProtocolError, httpx.UnsupportedProtocol)

Found = TypeVar("Found")


class _PassingError(Exception):
    """An answer after which the same request may succeed."""


def fault(url: str) -> str | None:
    """Return why a URL cannot be read, judged by its text alone, or None. Sends no request."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        return f"no URL: {error}"
    if parsed.userinfo:
        return "a password in a URL would be written into the store; let a server ask for none, or use s3://"
    return None if parsed.host else "no URL: it names no server"


def stamp(url: str) -> str:
    """Return size, ETag and time of the last write, as the server states them. Reads no byte of the file.

    Raises ``FileNotFoundError`` if there is no file, :class:`ConfigError` if the server refuses or does not say enough
    to notice a change, :class:`UnavailableError` if it does not answer.
    """

    def look() -> httpx.Headers:
        answer = _client(os.getpid()).head(url)
        _require(answer, url)
        return answer.headers

    said = _patiently(url, look, RETRY_FOR_S)
    found = [said.get(name, "") for name in ("Content-Length", "ETag", "Last-Modified")]
    if not found[0] or not any(found[1:]):
        needed = "Content-Length, and ETag or Last-Modified"
        raise ConfigError(f"{without_secrets(url)}: a change could not be noticed; the server must state {needed}")
    return " ".join(value.strip('"') for value in found if value)


def copy(url: str, file: BinaryIO) -> None:
    """Write the bytes at a URL to an empty file. An interrupted transfer goes on where it stopped.

    Raises like :func:`stamp`.
    """
    tag = ""

    def receive() -> None:
        nonlocal tag
        place = file.tell()
        # Without a tag that promises equal bytes, the rest could be of another file.
        wanted = {"Range": f"bytes={place}-", "If-Range": tag} if place and tag.startswith('"') else {}
        with _client(os.getpid()).stream("GET", url, headers=wanted) as answer:
            if answer.status_code != httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                _require(answer, url)
            if not answer.headers.get("Content-Range", "").startswith(f"bytes {place}-"):
                file.seek(0)
                file.truncate()
                if answer.status_code != httpx.codes.OK:
                    raise _PassingError("the server sent another part than was asked for")
            tag = answer.headers.get("ETag", "")
            # Bytes as they come: whole blocks would lose the bytes that came before an interruption.
            for block in answer.iter_raw():
                file.write(block)

    _patiently(url, receive, RETRY_FOR_S, file.tell)


def read(url: str, most_bytes: int, retry_for_s: float) -> bytes:
    """Return the bytes at a URL. Raises like :func:`stamp`, also for a web page and for more than ``most_bytes``."""

    def receive() -> bytes:
        with _client(os.getpid()).stream("GET", url) as answer:
            _require(answer, url)
            if "html" in (kind := answer.headers.get("Content-Type", "")):
                raise ConfigError(f"{without_secrets(url)}: the server answers with a page ({kind})")
            data = bytearray()
            for block in answer.iter_bytes():
                data += block
                if len(data) > most_bytes:
                    raise ConfigError(f"{without_secrets(url)} is larger than {most_bytes} bytes")
            return bytes(data)

    try:
        return _patiently(url, receive, retry_for_s)
    except httpx.InvalidURL as error:
        raise ConfigError(f"no URL: {error}") from error


@cache
def _client(_pid: int) -> httpx.Client:
    """Return the client of this process; a forked one must not use its parent's connections."""
    return client("", follow_redirects=True, timeout=TIMEOUT)


def _require(answer: httpx.Response, url: str) -> None:
    status = answer.status_code
    if status in _PASSING or (status >= 500 and status != httpx.codes.NOT_IMPLEMENTED):
        raise _PassingError(f"the server answers {status}")
    if status in (httpx.codes.NOT_FOUND, httpx.codes.GONE):
        raise FileNotFoundError(f"no file at {without_secrets(url)}: the server answers {status}")
    if not answer.is_success:
        raise ConfigError(f"{without_secrets(url)}: the server answers {status} to {answer.request.method}")


def _patiently(
    url: str,
    call: Callable[[], Found],
    retry_for_s: float,
    progress: Callable[[], int] = lambda: 0,
) -> Found:
    """Return the call's answer. Retry temporary failures after doubling waits, which begin anew after progress."""
    began_s, delay_s = time.monotonic(), FIRST_DELAY_S
    while True:
        before = progress()
        try:
            return call()
        except _NEVER as error:
            raise ConfigError(f"{without_secrets(url)}: {error}") from error
        except (httpx.TransportError, _PassingError) as error:
            if progress() > before:
                began_s, delay_s = time.monotonic(), FIRST_DELAY_S
            if time.monotonic() + delay_s > began_s + retry_for_s:
                raise UnavailableError(
                    f"cannot read {without_secrets(url)}: {str(error) or type(error).__name__}"
                ) from error
        except httpx.RequestError as error:
            raise ConfigError(f"{without_secrets(url)}: {error}") from error
        # Jitter keeps many processes from retrying at the same moment.
        time.sleep(delay_s * random.uniform(0.5, 1))
        delay_s = min(2 * delay_s, LONGEST_DELAY_S)
