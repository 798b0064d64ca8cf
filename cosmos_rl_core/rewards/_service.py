"""Location of a reward service, from cosmos-rl's environment variables alone."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Self

import httpx
from pydantic import Field, TypeAdapter

from cosmos_rl_core.errors import ConfigError

ENQUEUE_URL, FETCH_URL = "REMOTE_REWARD_ENQUEUE_URL", "REMOTE_REWARD_FETCH_URL"
TOKEN = "REMOTE_REWARD_TOKEN"
NO_REPLICA = "COSMOS_DISABLE_REMOTE_REWARD_USE_REPLICA"
FIXED_TIMEOUT = "REMOTE_REWARD_ENQUEUE_TIMEOUT_S"
"""Seconds to send a body of any size; replaces all timeouts but the one of connecting."""
TIMEOUTS = {
    "REMOTE_REWARD_ENQUEUE_TIMEOUT_BASE_S": 30.0,
    "REMOTE_REWARD_ENQUEUE_TIMEOUT_PER_MB_S": 3.0,
    "REMOTE_REWARD_ENQUEUE_TIMEOUT_MIN_S": 60.0,
    "REMOTE_REWARD_ENQUEUE_TIMEOUT_MAX_S": 600.0,
    "REMOTE_REWARD_ENQUEUE_CONNECT_TIMEOUT_S": 100.0,
}
"""Seconds by default: base plus so many per MiB of the body, between minimum and maximum; and to connect."""


@dataclass(frozen=True)
class Service:
    """Location of a reward service, and how long it may take to accept a request."""

    enqueue_url: str
    fetch_url: str
    token: str = field(default="", repr=False)
    timeouts_s: Mapping[str, float] = field(default_factory=lambda: TIMEOUTS)
    """Seconds by environment variable."""
    pins_replica: bool = True
    """Ask the replica that accepted a request for its scores, if the service names one."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Read the environment. White space around URLs and token is removed; an empty token means no token.

        Raises one :class:`ConfigError` with every variable that is missing or wrong; never shows the token.
        """
        urls = {name: environment.get(name, "").strip() for name in (ENQUEUE_URL, FETCH_URL)}
        token = environment.get(TOKEN, "").strip()
        mistakes = [
            f"{name} {fault}; set it to the full URL of the reward service, e.g. http://localhost:8080/api/reward/{path}"
            for (name, url), path in zip(urls.items(), ("enqueue", "pull"), strict=True)
            if (fault := _fault(url)) is not None
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
    def connect_timeout_s(self) -> float:
        """Return the seconds in which a connection must be made."""
        return self.timeouts_s["REMOTE_REWARD_ENQUEUE_CONNECT_TIMEOUT_S"]


_SECONDS = TypeAdapter[float](Annotated[float, Field(ge=0, allow_inf_nan=False)])


def fits_header(text: str) -> bool:
    """Return whether an HTTP header can hold a text."""
    return text.isascii() and text.isprintable() and text == text.strip()


def without_secrets(url: str) -> str:
    """Return a URL without user, password and query."""
    parsed = httpx.URL(url)
    return f"{parsed.scheme}://{parsed.netloc.decode()}{parsed.path}"


def _fault(url: str) -> str | None:
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
