"""A file that is downloaded once. Its sha256 lies beside it, as ``sha256sum`` writes it; later reads check it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from cosmos_rl_core import canonical
from cosmos_rl_core.errors import ConfigError, UnavailableError
from cosmos_rl_core.storage import store

PAUSES_S = (0.5, 1.0, 2.0, 4.0)
"""Pauses in seconds before a failed request is repeated."""
TIMEOUT_S = 30.0
"""Seconds to connect, and to wait for the next bytes."""
MAX_BYTES = 2**28
"""Largest size of a file in bytes."""
_PASSING = frozenset({408, 425, 429})
"""Statuses below 500 that a repetition of the same request may not meet again."""

_NEVER = (
    ConfigError,
    ValueError,
    httpx.InvalidURL,
    httpx.UnsupportedProtocol,
    httpx.LocalProtocolError,
    httpx.DecodingError,
    httpx.TooManyRedirects,
)
"""Errors of requests that no repetition can mend."""


@dataclass(frozen=True)
class File:
    """Place of a file, its origin, and what is known of its bytes."""

    path: Path
    url: str
    """Empty: it is never downloaded."""
    lines: int = 0
    """Lines that it has at least; 0 if unknown."""
    sha256: str = ""
    """Expected sha256 of its bytes in hex; empty if unknown."""

    @property
    def remedy(self) -> str:
        """Return what to do about other bytes."""
        return f"{'delete it to download it again, or ' if self.url else ''}put the whole file there"


def read(file: File, pauses_s: Sequence[float] = PAUSES_S) -> bytes:
    """Return the bytes of a file, downloaded if it is not there.

    Raises :class:`ConfigError` if they are not those that are expected, and :class:`UnavailableError` if they cannot be
    downloaded.
    """
    try:
        data = file.path.read_bytes()
    except FileNotFoundError as error:
        if file.url:
            return _downloaded(file, pauses_s)
        raise ConfigError(f"no file at {file.path}") from error
    except OSError as error:
        raise ConfigError(f"{file.path} cannot be read: {error}") from error
    if not data:
        raise ConfigError(
            f"{file.path} is empty, as cosmos-rl's wget leaves a file whose download failed; {file.remedy}"
        )
    found, recorded = canonical.sha256(data), _recorded(file.path)
    if recorded not in ("", found):
        raise ConfigError(
            f"{file.path} has changed since it was downloaded: sha256 {found}, expected {recorded}; {file.remedy}, or "
            f"delete {_record(file.path).name} beside it to use the file as it is"
        )
    if fault := _fault(file, data):
        raise ConfigError(f"{file.path}: {fault}; {file.remedy}")
    return data


def _downloaded(file: File, pauses_s: Sequence[float]) -> bytes:
    """Download and store a file. Nothing is stored unless its bytes are those that are expected."""
    offline = f"without a network, put the file at {file.path}"
    why = ""
    for pause_s in (0.0, *pauses_s):
        time.sleep(pause_s)
        try:
            data = _fetched(file.url)
        except _NEVER as error:
            raise ConfigError(f"{file.url} cannot be downloaded: {error}; {offline}") from error
        except (UnavailableError, httpx.TransportError) as error:
            why = str(error) or type(error).__name__
        else:
            if fault := _fault(file, data) if data else "it is empty":
                raise ConfigError(f"{file.url} is not the expected file: {fault}; {offline}")
            # The digest comes first, so that no file of a killed download lacks it.
            line = f"{canonical.sha256(data)}  {file.path.name}\n"
            store.write(str(_record(file.path)), line.encode())
            store.write(str(file.path), data)
            return data
    raise UnavailableError(f"{file.url} cannot be downloaded: {why}; {offline}")


def _fetched(url: str) -> bytes:
    """Return the body of one request. Raises :class:`UnavailableError` if a repetition can help.

    httpx raises ``TransportError`` for a body that is shorter than its Content-Length.
    """
    headers = {"Accept-Encoding": "identity"}
    with httpx.stream("GET", url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True) as answer:
        status = answer.status_code
        if status >= 500 or status in _PASSING:
            raise UnavailableError(f"the server answered {status}")
        if status != httpx.codes.OK:
            raise ConfigError(f"the server answered {status}")
        if "html" in (kind := answer.headers.get("Content-Type", "")):
            raise ConfigError(f"the server answered with a page ({kind})")
        data = bytearray()
        for block in answer.iter_bytes():
            data += block
            if len(data) > MAX_BYTES:
                raise ConfigError(f"it is larger than {MAX_BYTES} bytes")
        return bytes(data)


def _fault(file: File, data: bytes) -> str | None:
    """Return why bytes are not those that are expected, or None."""
    if file.sha256 and (found := canonical.sha256(data)) != file.sha256:
        return f"its sha256 is {found}, expected {file.sha256}"
    # The last line may lack its end.
    if (lines := data.count(b"\n") + 1) < file.lines:
        return f"it has {lines} lines, expected at least {file.lines}"
    return None


def _record(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _recorded(path: Path) -> str:
    """Return the digest that was written when the file was downloaded; empty for a file that came otherwise."""
    try:
        words = _record(path).read_text(encoding="utf-8").split()
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise ConfigError(f"{_record(path)} cannot be read: {error}; delete it") from error
    return words[0] if words else "nothing"
