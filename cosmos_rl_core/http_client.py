"""Clients of services over HTTP."""

from typing import Any

import httpx

from cosmos_rl_core.errors import ConfigError


def client(token: str, **options: Any) -> httpx.Client:
    """Return a client that sends a bearer token, if there is one, and asks for answers as they are, not compressed.

    Raises :class:`ConfigError` for an environment whose proxies or certificates cannot be used.
    """
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
    try:
        return httpx.Client(headers=headers, **options)
    except (ValueError, ImportError, OSError, httpx.InvalidURL) as error:
        reason = f"this environment's proxies or certificates: {error}"
        raise ConfigError(f"HTTP requests cannot be made with {reason}") from error


def without_secrets(url: str) -> str:
    """Return a URL without user, password and query."""
    parsed = httpx.URL(url)
    return f"{parsed.scheme}://{parsed.netloc.decode()}{parsed.path}"
