"""A client of reward services that speak cosmos-rl's protocol: a frame goes out, its scores are asked for until there.

A frame is a JSON line and an array: ``{"prompts": [...], "reward_fn": {"<name>": 1.0}, ...}``, a newline, the bytes of
an ``.npy`` file. Where the service is, and the token, come from the environment alone.
"""

import io
import json
import os
import ssl
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx
import numpy as np

from cosmos_rl_core.errors import ConfigError, UnavailableError

ENQUEUE_URL, FETCH_URL, TOKEN = "REMOTE_REWARD_ENQUEUE_URL", "REMOTE_REWARD_FETCH_URL", "REMOTE_REWARD_TOKEN"
NO_REPLICA = "COSMOS_DISABLE_REMOTE_REWARD_USE_REPLICA"
REPLICA_HEADER = "X-Lepton-Replica-Target"
PULL_TIMEOUT_S = 10.0
RETRY_DELAYS_S, POLL_DELAYS_S = (0.5, 30.0), (0.05, 5.0)
"""First and longest pause before a failed request is repeated, and before scores that were not ready are asked for."""

_PASSING = frozenset({408, 425, 429})
"""Besides all from 500 on, what may be over when the same request comes again."""
_NOT_READY = frozenset({202, 400})
"""cosmos-rl's service answers 400 until there are scores."""
_SHOWN = 300
MAX_REPLY_BYTES = 2**24
"""Largest reply that is read, in bytes after decompression. Scores of a request take some kilobytes."""
_NEVER = (httpx.LocalProtocolError, httpx.UnsupportedProtocol, httpx.TooManyRedirects)
"""Errors of a request that fails in the same way however often it is repeated."""


class RefusedError(ValueError):
    """The service did not score what it was sent, or gave an answer that has no scores. The message quotes it."""


@dataclass(frozen=True)
class Service:
    """Where the service is, and how long it may take to answer. cosmos-rl's names of environment variables."""

    enqueue_url: str
    fetch_url: str
    token: str = field(default="", repr=False)
    enqueue_timeout_s: Callable[[int], float] = lambda size: 30.0
    """Of a body of that many bytes."""
    connect_timeout_s: float = 100.0
    pins_replica: bool = True
    """Whether scores are asked of the replica that took the request, where the service names one."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Read the environment. White space around a URL or the token does not count; an empty token is none.

        Raises one :class:`ConfigError` with every variable that is missing or wrong; never shows the token.
        """
        urls = {name: environment.get(name, "").strip() for name in (ENQUEUE_URL, FETCH_URL)}
        token = environment.get(TOKEN, "").strip()
        mistakes = [
            f"{name} {wrong}; set it to the full URL of the reward service, e.g. http://localhost:8080/api/reward/{path}"
            for (name, url), path in zip(urls.items(), ("enqueue", "pull"), strict=True)
            if (wrong := _wrong_with(url)) is not None
        ]
        if not _fits_header(token) or " " in token:
            mistakes.append(f"{TOKEN} has white space or characters that no HTTP header takes; set the bare token")
        seconds = {name: _seconds(environment, name, default, mistakes) for name, default in _TIMEOUTS.items()}
        if mistakes:
            raise ConfigError("\n".join(mistakes))
        return cls(
            urls[ENQUEUE_URL],
            urls[FETCH_URL],
            token,
            lambda size: _enqueue_timeout(seconds, size),
            seconds["REMOTE_REWARD_ENQUEUE_CONNECT_TIMEOUT_S"] or 0.0,
            environment.get(NO_REPLICA, "0") != "1",
        )


_TIMEOUTS = {
    "REMOTE_REWARD_ENQUEUE_TIMEOUT_S": None,
    "REMOTE_REWARD_ENQUEUE_TIMEOUT_BASE_S": 30.0,
    "REMOTE_REWARD_ENQUEUE_TIMEOUT_PER_MB_S": 3.0,
    "REMOTE_REWARD_ENQUEUE_TIMEOUT_MIN_S": 60.0,
    "REMOTE_REWARD_ENQUEUE_TIMEOUT_MAX_S": 600.0,
    "REMOTE_REWARD_ENQUEUE_CONNECT_TIMEOUT_S": 100.0,
}
"""The first, where set, is the timeout of any body; else min and max hold base plus so much a MiB."""


def _seconds(environment: Mapping[str, str], name: str, default: float | None, mistakes: list[str]) -> float | None:
    try:
        given = float(environment[name]) if environment.get(name) else default
    except ValueError:
        given = -1.0
    if given is not None and not 0 <= given < float("inf"):
        mistakes.append(f"{name} = {environment[name]!r} is no number of seconds")
    return given


def _enqueue_timeout(seconds: Mapping[str, float | None], size: int) -> float:
    fixed, base, per_mb, least, most, _ = (seconds[name] for name in _TIMEOUTS)
    assert base is not None
    assert per_mb is not None
    assert least is not None
    assert most is not None
    return min(max(base + per_mb * size / 2**20, least), most) if fixed is None else fixed


def frame(prompts: list[str], reward_fn: str, media_type: str, array: np.ndarray, *, fps: float | None = None) -> bytes:
    """The body of a request: one prompt, and one entry of ``array``, a sample.

    ``media_type`` is ``image`` (uint8 ``[B, height, width, 3]``), ``video`` (uint8 ``[B, 3, frames, height, width]``)
    or ``latent`` (float16 ``[B, channels, frames, height, width]``). Videos, in either form, have ``fps``.
    """
    about: dict[str, Any] = {"prompts": prompts, "reward_fn": {reward_fn: 1.0}}
    if fps is not None:
        about["video_infos"] = [{"video_fps": fps}] * len(prompts)
    body = io.BytesIO()
    # Plain json.dumps leaves no newline in the line, and the service splits at the first.
    body.write(json.dumps(about | {"media_type": media_type}).encode() + b"\n")
    np.save(body, np.ascontiguousarray(array))
    return body.getvalue()


@dataclass(frozen=True)
class Ticket:
    """A request that the service took."""

    uuid: str
    replica: str
    deadline_s: float
    """Until when its scores are waited for, on the monotonic clock."""


class Client:
    """Sends frames and fetches scores, each request within ``timeout_s`` of its first try.

    A service that cannot be reached, is broken or does not get ready in time raises :class:`UnavailableError`; one that
    cannot be talked to so at all (URL, token, proxy, certificate, size of the body) :class:`ConfigError`.
    """

    def __init__(self, service: Service, timeout_s: float):
        self._service, self._timeout_s = service, timeout_s
        authorization = {"Authorization": f"Bearer {service.token}"} if service.token else {}
        try:
            self._http = httpx.Client(headers={"Accept-Encoding": "identity", **authorization})
        except (ValueError, ImportError, OSError, httpx.InvalidURL) as error:
            message = f"HTTP requests cannot be made with this environment's proxies or certificates: {error}"
            raise ConfigError(message) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._http.close()

    def check(self) -> str:
        """Ask both URLs once for what there is not, so that nothing is scored; return the statuses for people.

        Raises :class:`ConfigError` as a run would, and :class:`UnavailableError` at the first sign of absence.
        """
        found: list[str] = []
        nothing = {"uuid": "check", "type": "check"}
        for method, url, request in (
            ("GET", self._service.enqueue_url, {}),
            ("POST", self._service.fetch_url, {"data": nothing}),
        ):
            try:
                limit_s = min(PULL_TIMEOUT_S, self._timeout_s)
                answer = self._try(method, url, time.monotonic() + limit_s, PULL_TIMEOUT_S, **request)
            except RefusedError as error:
                raise UnavailableError(str(error)) from error
            if isinstance(answer, str):
                raise UnavailableError(f"the reward service at {_plain(url)} did not answer: {answer}")
            if answer.status_code in (401, 403) or answer.is_redirect:
                self._require_understood(url, answer)
            if answer.is_server_error and answer.status_code != httpx.codes.NOT_IMPLEMENTED:
                raise UnavailableError(f"the reward service at {_plain(url)} answered {self._said(answer)}")
            found.append(f"{answer.status_code} at {_plain(url)}")
        return f"answers {' and '.join(found)}"

    def enqueue(self, body: bytes) -> Ticket:
        """Hand over one frame. Raises :class:`RefusedError` if the service does not take this one."""
        deadline_s = time.monotonic() + self._timeout_s
        answer = self._post(
            self._service.enqueue_url,
            deadline_s,
            self._service.enqueue_timeout_s(len(body)),
            content=body,
            headers={"Content-Type": "application/octet-stream"},
        )
        if not answer.is_success:
            raise RefusedError(self._said(answer))
        told = self._json(answer)
        if not isinstance(told.get("uuid"), str) or not told["uuid"]:
            raise UnavailableError(f"the reward service took a request and named no uuid: {self._said(answer)}")
        return Ticket(told["uuid"], self._replica(told.get("replica_id")), deadline_s)

    def _replica(self, named: Any) -> str:
        """The header's value that pins the replica; empty for none."""
        if not self._service.pins_replica or named is None:
            return ""
        if not isinstance(named, str) or not _fits_header(named):
            raise RefusedError(
                f"the reward service named the replica {shorten(repr(named))}, which no HTTP header takes; mend the "
                f"service, or set {NO_REPLICA}=1"
            )
        return named

    def result(self, ticket: Ticket, reward_fn: str) -> dict[str, Any]:
        """The service's answer, once it is there. Raises :class:`RefusedError` if it says that scoring failed."""
        answer = self._fetch(ticket, reward_fn)
        told = self._json(answer)
        if told.get("error") or told.get("scores") is None:
            raise RefusedError(self._said(answer))
        if told.get("type", reward_fn) != reward_fn or not isinstance(told["scores"], dict):
            raise RefusedError(f"asked for {reward_fn}, got {self._said(answer)}")
        return told

    def _fetch(self, ticket: Ticket, reward_fn: str) -> httpx.Response:
        headers = {REPLICA_HEADER: ticket.replica} if ticket.replica else {}
        form = {"uuid": ticket.uuid, "type": reward_fn}
        for pause_s in _pauses(*POLL_DELAYS_S):
            answer = self._post(self._service.fetch_url, ticket.deadline_s, PULL_TIMEOUT_S, data=form, headers=headers)
            if answer.status_code == httpx.codes.OK:
                return answer
            if answer.status_code not in _NOT_READY:
                raise RefusedError(self._said(answer))
            if time.monotonic() + pause_s > ticket.deadline_s:
                raise UnavailableError(
                    f"no {reward_fn} scores of request {ticket.uuid} after {self._timeout_s:g} s; the service says "
                    f"{self._said(answer)}; its log says whether it is slow (raise timeout_s) or failed"
                )
            time.sleep(pause_s)
        raise AssertionError("pauses never end")

    def _post(self, url: str, deadline_s: float, timeout_s: float, **request: Any) -> httpx.Response:
        """The answer, after as many tries as there is time for."""
        for pause_s in _pauses(*RETRY_DELAYS_S):
            answer = self._try("POST", url, deadline_s, timeout_s, **request)
            if isinstance(answer, str):
                found = answer
            else:
                self._require_understood(url, answer)
                if answer.status_code < 500 and answer.status_code not in _PASSING:
                    return answer
                found = self._said(answer)
            if time.monotonic() + pause_s > deadline_s:
                raise UnavailableError(f"the reward service at {_plain(url)} did not answer: {found}")
            time.sleep(pause_s)
        raise AssertionError("pauses never end")

    def _try(self, method: str, url: str, deadline_s: float, timeout_s: float, **request: Any) -> httpx.Response | str:
        """The answer to one request, or what kept it away: also that it did not end ``timeout_s`` after it began.

        Raises :class:`ConfigError` for a request that can never arrive.
        """
        timeout = httpx.Timeout(timeout_s, connect=self._service.connect_timeout_s)
        try:
            with self._http.stream(method, url, timeout=timeout, **request) as answer:
                body = _body(answer, min(deadline_s, time.monotonic() + timeout_s))
                return httpx.Response(answer.status_code, content=body)
        except (httpx.TransportError, httpx.TooManyRedirects, httpx.InvalidURL, UnicodeError) as error:
            found = f"{type(error).__name__}: {error}".rstrip(": ")
            if isinstance(error, httpx.TransportError) and not isinstance(error, _NEVER) and not _distrusts(error):
                return found
            message = f"no request to the reward service at {_plain(url)} can be made: {found}"
            raise ConfigError(f"{message}; check {ENQUEUE_URL}, {FETCH_URL}, {TOKEN}") from error

    def _require_understood(self, url: str, answer: httpx.Response) -> None:
        """Raise :class:`ConfigError` for what no other sample and no other try can mend."""
        remedies = {
            401: f"set {TOKEN}",
            403: f"set {TOKEN}",
            404: f"check {ENQUEUE_URL} and {FETCH_URL}; if they are right, the service has lost the request",
            405: f"check {ENQUEUE_URL} and {FETCH_URL}",
            413: "lower batch_size",
        }
        if answer.status_code == 404 and url == self._service.fetch_url:
            raise UnavailableError(f"the reward service does not know what it was sent: {self._said(answer)}")
        if answer.status_code in remedies or answer.is_redirect:
            remedy = remedies.get(answer.status_code, "it redirects; set its final URL")
            raise ConfigError(f"the reward service at {_plain(url)} answered {self._said(answer)}: {remedy}")

    def _json(self, answer: httpx.Response) -> dict[str, Any]:
        try:
            told = json.loads(answer.content)
            # Half a surrogate pair, which JSON can spell, fits no request and no file.
            json.dumps(told, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise RefusedError(f"the reward service answered without JSON: {self._said(answer)}") from error
        if not isinstance(told, dict):
            raise RefusedError(f"the reward service answered without a JSON object: {self._said(answer)}")
        return told

    def _said(self, answer: httpx.Response) -> str:
        """Status and text, cut short, without the token that a service might repeat."""
        # The charset that a header names may be any codec of Python's, also one that is none of text.
        text = " ".join(answer.content.decode(errors="replace").split())
        text = text.replace(self._service.token, "<token>") if self._service.token else text
        return f"{answer.status_code} {shorten(text)}"


def shorten(text: str) -> str:
    """The beginning of a service's answer, which may be of any length, for a message."""
    return f"{text[:_SHOWN]}{'...' if len(text) > _SHOWN else ''}"


def _body(answer: httpx.Response, deadline_s: float) -> bytes:
    """The reply, decompressed.

    Raises :class:`RefusedError` for one that is too large, cut, or compressed in another way, and
    ``httpx.ReadTimeout`` for one that goes on after ``deadline_s``, on the monotonic clock.
    """
    coding = answer.headers.get("Content-Encoding", "").strip().lower() or "identity"
    if coding not in ("identity", "gzip", "x-gzip", "deflate"):
        raise RefusedError(f"the reward service compresses its answer by {shorten(repr(coding))}, not asked for")
    inflate = None if coding == "identity" else _Inflate()
    body = bytearray()
    for i, block in enumerate(answer.iter_raw()):
        if i > 0 and time.monotonic() > deadline_s:
            raise httpx.ReadTimeout("the answer began and did not end in time")
        try:
            body += block if inflate is None else inflate.more(block, MAX_REPLY_BYTES + 1 - len(body))
        except zlib.error as error:
            raise RefusedError(f"the reward service's answer is not {coding}: {error}") from error
        if len(body) > MAX_REPLY_BYTES:
            raise RefusedError(f"the reward service's answer is larger than {MAX_REPLY_BYTES} bytes")
    if inflate is not None and not inflate.ended:
        raise RefusedError(f"the reward service's answer is cut: its {coding} has no end")
    return bytes(body)


class _Inflate:
    """Decompresses up to a bound, unlike httpx. A gzip may have several members, and zeros after each."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
        self.ended = True  # no member is unfinished

    def more(self, block: bytes, room: int) -> bytes:
        """Return what ``block`` adds, ``room`` bytes at most: whoever gets as many must not ask for more."""
        found = b""
        while len(found) < room and (block := block.lstrip(b"\0") if self.ended else block):
            found += self._member.decompress(block, room - len(found))
            block, self.ended = self._member.unused_data, self._member.eof
            if self.ended:
                self._member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
        return found


def _wrong_with(url: str) -> str | None:
    """Why no request can go to a URL, or None."""
    if not url:
        return "is not set"
    try:
        parsed = httpx.URL(url)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            return "is no http(s) URL"
        parsed.host.encode("idna")
    except (httpx.InvalidURL, ValueError) as error:
        return f"is no http(s) URL ({error})"
    return None if parsed.port is None or 0 < parsed.port < 2**16 else f"has the port {parsed.port}"


def _fits_header(text: str) -> bool:
    return text.isascii() and text.isprintable() and text == text.strip()


def _distrusts(error: BaseException | None) -> bool:
    """Whether TLS failed for a reason that stays: a certificate that is not trusted, or a server without TLS."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        if isinstance(error, ssl.SSLError) and error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            return True
        error = error.__cause__ or error.__context__
    return False


def _pauses(first_s: float, longest_s: float) -> Iterator[float]:
    """Ever longer ones, without end."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(1.5 * pause_s, longest_s)


def _plain(url: str) -> str:
    """Without user, password and query, which may be secrets."""
    parsed = httpx.URL(url)
    return f"{parsed.scheme}://{parsed.netloc.decode()}{parsed.path}"
