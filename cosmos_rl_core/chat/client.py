"""Client of ``/chat/completions``: one answer to one request, tried again while the service is away or busy."""

import email.utils
import json
import threading
import time
from typing import Any, Self

import httpx

from cosmos_rl_core.errors import ConfigError, UnavailableError
from cosmos_rl_core.http_client import client

LONGEST_PAUSE_S = 60.0
"""Longest pause between two tries that the client chooses itself."""
LONGEST_WAIT_S = 600.0
"""Longest pause that a service may ask for. A service that asks for more counts as unavailable."""
MAX_REPLY_BYTES = 2**22
_PASSING = frozenset({408, 409, 425, 429})
"""Statuses below 500 after which the same request may succeed when it is repeated."""
_OF_ALL = {
    401: "its token is missing or wrong; see token_variable",
    403: "its token is missing or wrong; see token_variable",
    404: "check url and model",
    405: "check url",
}
"""Advice by status, for statuses that every request would get."""


class RefusedError(ValueError):
    """No answer to one request; the message says why. ``final`` is False if a later attempt may get one."""

    def __init__(self, reason: str, *, final: bool) -> None:
        super().__init__(reason)
        self.final = final


class Chat:
    """Sends requests, from several threads at once. A pause ends early when ``stop`` is set.

    Raises :class:`UnavailableError` if the service is away or busy for all tries, :class:`ConfigError` if it would
    refuse every request, and :class:`RefusedError` if it gives no answer to this one.
    """

    def __init__(
        self, url: str, token: str, stop: threading.Event, *, timeout_s: float, tries: int, pause_s: float
    ) -> None:
        self._url, self._token, self._stop = f"{url}/chat/completions", token, stop
        self._timeout_s, self._tries, self._pause_s = timeout_s, tries, pause_s
        # Concurrency is bounded by the caller's threads.
        self._http = client(token, timeout=timeout_s, limits=httpx.Limits(max_connections=None))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def answer(self, request: dict[str, Any], name: str) -> str:
        """Return the text that the service answers to a request, without white space around it."""
        body, pause_s, found, number = json.dumps(request).encode(), self._pause_s, "", 0
        for number in range(1, self._tries + 1):
            reply = self._try(body)
            if isinstance(reply, httpx.Response):
                if reply.is_success:
                    return self._text(reply)
                self._require_passing(reply)
                found, asked_s = self._quote(reply), _retry_after_s(reply)
            else:
                found, asked_s = reply, 0.0
            if asked_s > LONGEST_WAIT_S:
                found = f"{found}, and asks for a pause of {asked_s:g} s"
                break
            if number < self._tries and self._stop.wait(max(asked_s, min(pause_s, LONGEST_PAUSE_S))):
                break
            pause_s *= 2
        raise UnavailableError(f"{self._url} gave no answer on {name} in {number} tries: {found}")

    def _try(self, body: bytes) -> httpx.Response | str:
        """Return a whole reply, or why there was none."""
        deadline_s = time.monotonic() + self._timeout_s
        headers = {"Content-Type": "application/json"}
        try:
            with self._http.stream("POST", self._url, content=body, headers=headers) as reply:
                data = bytearray()
                for block in reply.iter_raw():
                    data += block
                    if time.monotonic() > deadline_s:
                        return f"its answer did not end in {self._timeout_s:g} s"
                    if len(data) > MAX_REPLY_BYTES:
                        return f"its answer is larger than {MAX_REPLY_BYTES} bytes"
                return httpx.Response(reply.status_code, headers=_kept(reply.headers), content=bytes(data))
        except (httpx.LocalProtocolError, httpx.UnsupportedProtocol, httpx.InvalidURL, UnicodeError) as error:
            raise ConfigError(f"no request to {self._url} can be made: {error}") from error
        except httpx.TransportError as error:
            return f"{type(error).__name__}: {error}".rstrip(": ")

    def _require_passing(self, reply: httpx.Response) -> None:
        """Raise an error for a reply that another try would not change."""
        status = reply.status_code
        if (status >= 500 and status != httpx.codes.NOT_IMPLEMENTED) or status in _PASSING:
            return
        if reply.is_redirect or status in _OF_ALL or status >= 500 or status < 400:
            remedy = _OF_ALL.get(status, "check url")
            raise ConfigError(f"{self._url} answered {self._quote(reply)}: {remedy}")
        raise RefusedError(f"the service answered {self._quote(reply)}", final=False)

    def _text(self, reply: httpx.Response) -> str:
        """Return the text of a reply. Raises :class:`RefusedError` if it is no whole answer."""
        try:
            choice = json.loads(reply.content)["choices"][0]
            message, end = choice["message"], choice.get("finish_reason")
            text, refusal = message.get("content"), message.get("refusal")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise RefusedError(f"the service answered no completion: {self._quote(reply)}", final=False) from error
        if refusal or end == "content_filter":
            raise RefusedError(f"the model refused: {_brief(str(refusal or end))}", final=True)
        if end == "length":
            raise RefusedError("the answer is cut at max_tokens; raise it", final=True)
        if not isinstance(text, str) or not text.strip():
            raise RefusedError("the model answered nothing", final=True)
        try:
            text.encode()
        except UnicodeError as error:
            raise RefusedError("the answer is no text that can be encoded", final=True) from error
        return text.strip()

    def _quote(self, reply: httpx.Response) -> str:
        """Return status and text, cut short, without the token that a service might repeat."""
        text = reply.content.decode(errors="replace")
        text = text.replace(self._token, "<token>") if self._token else text
        return f"{reply.status_code} {_brief(text)}".rstrip()


def _kept(headers: httpx.Headers) -> dict[str, str]:
    return {name: headers[name] for name in ("retry-after", "location") if name in headers}


def _retry_after_s(reply: httpx.Response) -> float:
    """Return the pause that a reply asks for, in seconds; 0 without one."""
    value = reply.headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        at_s = email.utils.parsedate_to_datetime(value).timestamp()
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return max(0.0, at_s - time.time())


def _brief(text: str) -> str:
    words = " ".join(text.split())
    return f"{words[:200]}..." if len(words) > 200 else words
