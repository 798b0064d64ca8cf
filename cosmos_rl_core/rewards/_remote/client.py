"""Client of reward services that speak cosmos-rl's protocol: send a frame, then poll for its scores."""

import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

import httpx
from httpx import Response
from pydantic import Field, TypeAdapter

from cosmos_rl_core.errors import ConfigError, UnavailableError
from cosmos_rl_core.http_client import client, without_secrets
from cosmos_rl_core.processes import TRAFFIC
from cosmos_rl_core.rewards._base.answers import brief
from cosmos_rl_core.rewards._base.served import FORMAT, ServedScorer
from cosmos_rl_core.rewards._remote.tries import POLL_DELAYS_S, RETRY_DELAYS_S, tries

ENQUEUE_URL, FETCH_URL = "REMOTE_REWARD_ENQUEUE_URL", "REMOTE_REWARD_FETCH_URL"
TOKEN = "REMOTE_REWARD_TOKEN"
PREFIXES = ("REMOTE_REWARD_", "DIFFUSION_REWARD_", "WFM_REWARD_")
"""Beginnings of the variables' names. The first variable that is set counts."""
NO_REPLICA = "COSMOS_DISABLE_REMOTE_REWARD_USE_REPLICA"
FIXED_TIMEOUT = "REMOTE_REWARD_ENQUEUE_TIMEOUT_S"
"""Variable with the seconds to send a body of any size. It replaces all other timeouts except the one to connect."""
TIMEOUTS = {
    "REMOTE_REWARD_ENQUEUE_TIMEOUT_BASE_S": 30.0,
    "REMOTE_REWARD_ENQUEUE_TIMEOUT_PER_MB_S": 3.0,
    "REMOTE_REWARD_ENQUEUE_TIMEOUT_MIN_S": 60.0,
    "REMOTE_REWARD_ENQUEUE_TIMEOUT_MAX_S": 600.0,
    "REMOTE_REWARD_ENQUEUE_CONNECT_TIMEOUT_S": 100.0,
}
"""Variables of timeouts with their defaults in seconds. The timeout of a body is the base plus so many seconds for each
MiB, but at least the minimum and at most the maximum. The last one is the timeout of connecting."""
REPLICA_HEADER = "X-Lepton-Replica-Target"
PULL_TIMEOUT_S = 10.0
MAX_REPLY_BYTES = 2**24
"""Largest reply that is read, in bytes after decompression. Scores of a request take some kilobytes."""

_PASSING = frozenset({408, 425, 429})
"""Statuses below 500 after which the same request may succeed when it is repeated."""
_NOT_READY = frozenset({202, 400})
"""Statuses of a service without scores yet; cosmos-rl's answers 400."""
_NEVER = (httpx.LocalProtocolError, httpx.UnsupportedProtocol, httpx.TooManyRedirects)
"""Errors of requests that no repetition can mend."""
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "CERTIFICATE_VERIFY_FAILED")
"""OpenSSL's reasons for a server without TLS, or with a certificate that is not trusted."""
_ANSWER = "the reward service's answer"
_REMEDIES = {
    401: f"set {TOKEN}",
    403: f"set {TOKEN}",
    404: f"check {ENQUEUE_URL} and {FETCH_URL}; if they are right, the service has lost the request",
    405: f"check {ENQUEUE_URL} and {FETCH_URL}",
    413: "lower batch_size",
}
"""Advice by status, for errors that neither another sample nor another try can mend."""


@dataclass(frozen=True)
class Service:
    """Location of a reward service, and how long it may take to accept a request."""

    enqueue_url: str
    fetch_url: str
    token: str = field(default="", repr=False)
    timeouts_s: Mapping[str, float] = field(default_factory=lambda: TIMEOUTS)
    """Timeouts in seconds, by the name of their environment variable."""
    pins_replica: bool = True
    """Whether scores are fetched from the replica that accepted the request, if the service names it."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Read the environment. White space around URLs and token is removed; an empty token means no token.

        Each variable may also begin with another one of :data:`PREFIXES`.

        Raises one :class:`ConfigError` with every variable that is missing or wrong; never shows the token.
        """
        environment = _with_first_prefix(environment)
        urls = {name: environment.get(name, "").strip() for name in (ENQUEUE_URL, FETCH_URL)}
        token = environment.get(TOKEN, "").strip()
        mistakes = [
            f"{name} {fault}; set it to the full URL of the reward service, e.g. http://localhost:8080/api/reward/{path}"
            for (name, url), path in zip(urls.items(), ("enqueue", "pull"), strict=True)
            if (fault := url_fault(url)) is not None
        ]
        if not fits_header(token) or " " in token:
            mistakes.append(f"{TOKEN} has characters that no HTTP header takes; set the bare token")
        timeouts_s = dict(TIMEOUTS)
        for name in (FIXED_TIMEOUT, *TIMEOUTS):
            try:
                if text := environment.get(name):
                    timeouts_s[name] = _SECONDS.validate_python(float(text))
            except ValueError:
                mistakes.append(f"{name} = {environment[name]!r} is no number of seconds")
        if mistakes:
            raise ConfigError("\n".join(mistakes))
        pins_replica = environment.get(NO_REPLICA, "0") != "1"
        return cls(urls[ENQUEUE_URL], urls[FETCH_URL], token, timeouts_s, pins_replica)

    def enqueue_timeout_s(self, size: int) -> float:
        """Return the seconds in which a body of ``size`` bytes must be accepted."""
        base, per_mb, least, most, _ = (self.timeouts_s[name] for name in TIMEOUTS)
        grown = min(max(base + per_mb * size / 2**20, least), most)
        return self.timeouts_s.get(FIXED_TIMEOUT, grown)

    @property
    def info_url(self) -> str:
        """Return the URL at which services describe their scorers: ``info`` next to the enqueue URL."""
        return str(httpx.URL(self.enqueue_url).join("info"))

    @property
    def connect_timeout_s(self) -> float:
        """Return the seconds in which a connection must be made."""
        return self.timeouts_s["REMOTE_REWARD_ENQUEUE_CONNECT_TIMEOUT_S"]


def is_named(environment: Mapping[str, str]) -> bool:
    """Return whether the environment names a reward service."""
    return bool(_with_first_prefix(environment).get(ENQUEUE_URL))


def _with_first_prefix(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which variables with other prefixes also have their name with the first prefix.

    A variable that is set under its name with the first prefix keeps its value.
    """
    found = dict(environment)
    for prefix in PREFIXES[1:]:
        for name, value in environment.items():
            same = PREFIXES[0] + name.removeprefix(prefix)
            if name.startswith(prefix) and value.strip() and not found.get(same, "").strip():
                found[same] = value
    return found


_SECONDS = TypeAdapter[float](Annotated[float, Field(ge=0, allow_inf_nan=False)])


def fits_header(text: str) -> bool:
    """Return whether an HTTP header can hold a text."""
    return text.isascii() and text.isprintable() and text == text.strip()


def url_fault(url: str) -> str | None:
    """Return why no request can be sent to a URL, or None."""
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


class LostError(UnavailableError):
    """The service does not know a request that it accepted."""


class RefusedError(ValueError):
    """The service did not score a request, or answered without scores. The message quotes its answer."""

    def __init__(self, message: str, answer: Response | None = None) -> None:
        super().__init__(message)
        self.answer = answer
        """The service's answer to the request, or to the poll for its scores."""


@dataclass(frozen=True)
class Ticket:
    """A request that the service accepted."""

    uuid: str
    replica: str
    deadline_s: float
    """Time on the monotonic clock after which polling for scores ends."""


class Client:
    """Sends frames and fetches scores, each request within ``timeout_s`` of its first try. Threads may share it.

    Raises :class:`UnavailableError` if the service cannot be reached, is broken or is not ready in time, and
    :class:`ConfigError` if no request can work: wrong URL, token, proxy, certificate or size of the body.
    """

    def __init__(self, service: Service, timeout_s: float):
        self._service, self._timeout_s = service, timeout_s
        self._http = client(service.token)
        self.known = False
        """Whether the fetch URL has ever answered a poll for scores as a reward service does."""
        self.ended = threading.Event()
        """Set when the client is closed, so that no thread tries again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        self._http.close()

    def check(self) -> str:
        """Send both URLs one request that scores nothing; return their statuses and the scorers as text.

        Raises :class:`ConfigError` like a run, and :class:`UnavailableError` after the first failure.
        """
        nothing = {"uuid": "check", "type": "check"}
        enqueue = self._checked("GET", self._service.enqueue_url)
        fetch = self._checked("POST", self._service.fetch_url, data=nothing)
        told = [str(ServedScorer.of(name, one) or name) for name, one in (self.scorers_now() or {}).items()]
        return f"answers {enqueue} and {fetch}{'; ' if told else ''}{', '.join(told)}"

    def _checked(self, method: str, url: str, **request: Any) -> str:
        deadline_s = time.monotonic() + min(PULL_TIMEOUT_S, self._timeout_s)
        try:
            answer = self._try(method, url, deadline_s, PULL_TIMEOUT_S, **request)
        except RefusedError as error:
            raise UnavailableError(str(error)) from error
        if isinstance(answer, str):
            raise UnavailableError(f"{_place(url)} did not answer: {answer}")
        if answer.status_code in (401, 403) or answer.is_redirect:
            self._require_understood(url, answer)
        if answer.is_server_error and answer.status_code != httpx.codes.NOT_IMPLEMENTED:
            raise UnavailableError(f"{_place(url)} answered {self._quote(answer)}")
        return f"{answer.status_code} at {without_secrets(url)}"

    def scorers(self) -> dict[str, Any] | None:
        """Return the service's descriptions of its scorers, by name; None if it has none, like cosmos-rl's service.

        Raises :class:`ConfigError` and :class:`UnavailableError` as other requests do.
        """
        away = UnavailableError(f"{_place(self._service.info_url)} was not asked")
        for _ in tries(time.monotonic() + self._timeout_s, RETRY_DELAYS_S, self.ended):
            try:
                return self.scorers_now()
            except UnavailableError as error:
                away = error
        raise away

    def scorers_now(self) -> dict[str, Any] | None:
        """Return the same as :meth:`scorers`, but raise :class:`UnavailableError` after the first failure."""
        url = self._service.info_url
        answer = self._try("GET", url, time.monotonic() + PULL_TIMEOUT_S, PULL_TIMEOUT_S)
        if isinstance(answer, str):
            raise UnavailableError(f"{_place(url)} did not answer: {answer}")
        if answer.status_code in (401, 403):
            self._require_understood(url, answer)
        passing = answer.is_server_error and answer.status_code != httpx.codes.NOT_IMPLEMENTED
        if passing or answer.status_code in _PASSING:
            raise UnavailableError(f"{_place(url)} did not answer: {self._quote(answer)}")
        return self._told(answer)

    def _told(self, answer: Response) -> dict[str, Any] | None:
        try:
            told = self._json(answer) if answer.status_code == httpx.codes.OK else {}
        except RefusedError:
            return None
        if not isinstance(scorers := told.get("scorers"), dict):
            return None
        if told.get("format") != FORMAT:
            found = f"describes its scorers in format {told.get('format')!r}, expected {FORMAT}"
            raise ConfigError(f"{_place(self._service.info_url)} {found}")
        return scorers

    def enqueue(self, body: bytes, deadline_s: float | None = None) -> Ticket:
        """Send the body of one request. Raises :class:`RefusedError` if the service does not accept it."""
        deadline_s = time.monotonic() + self._timeout_s if deadline_s is None else deadline_s
        url, limit_s = self._service.enqueue_url, self._service.enqueue_timeout_s(len(body))
        headers = {"Content-Type": "application/octet-stream"}
        answer = self._post(url, deadline_s, limit_s, content=body, headers=headers)
        if not answer.is_success:
            raise RefusedError(self._quote(answer), answer)
        told = self._json(answer)
        if not isinstance(told.get("uuid"), str) or not told["uuid"]:
            raise UnavailableError(f"the reward service named no uuid: {self._quote(answer)}")
        replica = (told.get("replica_id") if self._service.pins_replica else None) or ""
        if not isinstance(replica, str) or not fits_header(replica):
            found = f"the reward service named the replica {brief(repr(replica))}"
            advice = f"mend the service, or set {NO_REPLICA}=1"
            raise RefusedError(f"{found}, which no HTTP header takes; {advice}")
        return Ticket(told["uuid"], replica, deadline_s)

    def result(self, ticket: Ticket, reward_fn: str) -> dict[str, Any]:
        """Wait for the service's answer and return it. Raises :class:`RefusedError` if scoring failed."""
        answer = self._fetch(ticket, reward_fn)
        told = self._json(answer)
        if told.get("error") or told.get("scores") is None:
            raise RefusedError(self._quote(answer), answer)
        if told.get("type", reward_fn) != reward_fn or not isinstance(told["scores"], dict):
            raise RefusedError(f"asked for {reward_fn}, got {self._quote(answer)}")
        return told

    def _fetch(self, ticket: Ticket, reward_fn: str) -> Response:
        headers = {REPLICA_HEADER: ticket.replica} if ticket.replica else {}
        form, found = {"uuid": ticket.uuid, "type": reward_fn}, ""
        url, deadline_s = self._service.fetch_url, ticket.deadline_s
        for _ in tries(deadline_s, POLL_DELAYS_S, self.ended):
            answer = self._post(url, deadline_s, PULL_TIMEOUT_S, data=form, headers=headers)
            self.known = True
            if answer.status_code == httpx.codes.OK:
                return answer
            found = self._quote(answer)
            if answer.status_code not in _NOT_READY:
                raise RefusedError(found)
        missing = f"no {reward_fn} scores of request {ticket.uuid} after {self._timeout_s:g} s"
        advice = "its log shows whether it is slow (raise timeout_s) or failed"
        raise UnavailableError(f"{missing}; the service answers {found}; {advice}")

    def _post(self, url: str, deadline_s: float, timeout_s: float, **request: Any) -> Response:
        """Return the answer, after as many tries as the deadline allows."""
        found = ""
        for _ in tries(deadline_s, RETRY_DELAYS_S, self.ended):
            answer = self._try("POST", url, deadline_s, timeout_s, **request)
            if isinstance(answer, str):
                found = answer
                continue
            self._require_understood(url, answer)
            if answer.status_code < 500 and answer.status_code not in _PASSING:
                return answer
            found = self._quote(answer)
        raise UnavailableError(f"{_place(url)} did not answer: {found}")

    def _try(self, method: str, url: str, deadline_s: float, timeout_s: float, **request: Any) -> Response | str:
        """Return the answer to one request, or why there was none within ``timeout_s``.

        Raises :class:`ConfigError` for a request that can never arrive.
        """
        timeout = httpx.Timeout(timeout_s, connect=self._service.connect_timeout_s)
        try:
            with TRAFFIC.waiting(), self._http.stream(method, url, timeout=timeout, **request) as answer:
                body = _body(answer, min(deadline_s - time.monotonic(), timeout_s))
                return Response(answer.status_code, content=body)
        except httpx.DecodingError as error:
            raise RefusedError(f"{_ANSWER} cannot be decompressed: {error}") from error
        except (httpx.RequestError, httpx.InvalidURL, UnicodeError) as error:
            found = f"{type(error).__name__}: {error}".rstrip(": ")
            passing = isinstance(error, httpx.TransportError) and not isinstance(error, _NEVER)
            if passing and not any(reason in found for reason in _NO_TLS):
                return found
            message = f"no request to {_place(url)} can be made: {found}"
            raise ConfigError(f"{message}; check {ENQUEUE_URL}, {FETCH_URL}, {TOKEN}") from error

    def _require_understood(self, url: str, answer: Response) -> None:
        """Raise :class:`ConfigError` for an answer that no other sample and no other try would change.

        Raises :class:`LostError` if the fetch URL does not know its request.
        """
        if answer.status_code == 404 and url == self._service.fetch_url:
            found = self._quote(answer)
            raise LostError(f"{_place(url)} does not know its request: {found}; check {FETCH_URL}")
        remedy = _REMEDIES.get(answer.status_code)
        if answer.is_redirect:
            remedy = "it redirects; set its final URL"
        if remedy is not None:
            raise ConfigError(f"{_place(url)} answered {self._quote(answer)}: {remedy}")

    def _json(self, answer: Response) -> dict[str, Any]:
        try:
            told = json.loads(answer.content)
            # Half a surrogate pair, which JSON can spell, fits no request and no file.
            json.dumps(told, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise RefusedError(f"{_ANSWER} is not JSON: {self._quote(answer)}") from error
        if not isinstance(told, dict):
            raise RefusedError(f"{_ANSWER} is not a JSON object: {self._quote(answer)}")
        return told

    def _quote(self, answer: Response) -> str:
        """Return status and text, cut short, without the token that a service might repeat."""
        # A header may name any codec of Python as the charset, even one that makes bytes.
        text = answer.content.decode(errors="replace")
        text = text.replace(self._service.token, "<token>") if self._service.token else text
        return f"{answer.status_code} {brief(text)}"


def _place(url: str) -> str:
    return f"the reward service at {without_secrets(url)}"


def _body(answer: Response, limit_s: float) -> bytes:
    """Return the reply, decompressed.

    Raises :class:`RefusedError` for a reply that is too large, and ``httpx.ReadTimeout`` for one that has not ended in
    ``limit_s`` seconds.
    """
    body, deadline_s = bytearray(), time.monotonic() + limit_s
    for i, block in enumerate(answer.iter_bytes()):
        if i > 0 and time.monotonic() > deadline_s:
            raise httpx.ReadTimeout(f"the answer began and did not end within {max(limit_s, 0.0):.3g} s")
        body += block
        if len(body) > MAX_REPLY_BYTES:
            raise RefusedError(f"{_ANSWER} is larger than {MAX_REPLY_BYTES} bytes")
    return bytes(body)
