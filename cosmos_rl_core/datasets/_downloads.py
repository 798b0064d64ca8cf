"""A file that is downloaded once, with its sha256 next to it, as ``sha256sum`` writes it; later reads check it."""

from dataclasses import dataclass
from pathlib import Path

from cosmos_rl_core import canonical
from cosmos_rl_core.errors import ConfigError, UnavailableError
from cosmos_rl_core.storage import http, store

RETRY_FOR_S = 8.0
"""Seconds after which a file that cannot be downloaded counts as unavailable. Planning waits for it."""
MAX_BYTES = 2**28
"""Largest size of a file in bytes."""


@dataclass(frozen=True)
class File:
    """Place of a file, its origin, and the known facts about its bytes."""

    path: Path
    url: str
    """URL of the file; empty for a file that is never downloaded."""
    lines: int = 0
    """Least number of lines of the file; 0 if unknown."""
    sha256: str = ""
    """Expected sha256 of its bytes in hex; empty if unknown."""

    @property
    def remedy(self) -> str:
        """Return advice for a file that has other bytes than expected."""
        return f"{'delete it to download it again, or ' if self.url else ''}put the whole file there"


def read(file: File) -> bytes:
    """Return the bytes of a file, downloaded if it is not there.

    Raises :class:`ConfigError` if they are not the expected bytes, and :class:`UnavailableError` if they cannot be
    downloaded.
    """
    try:
        data = file.path.read_bytes()
    except FileNotFoundError as error:
        if file.url:
            return _downloaded(file)
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
            f"delete {_record(file.path).name} next to it to use the file as it is"
        )
    if fault := _fault(file, data):
        raise ConfigError(f"{file.path}: {fault}; {file.remedy}")
    return data


def _downloaded(file: File) -> bytes:
    """Download and store a file. Nothing is stored unless its bytes are the expected ones."""
    offline = f"without a network, put the file at {file.path}"
    try:
        data = http.read(file.url, MAX_BYTES, RETRY_FOR_S)
    except (ConfigError, FileNotFoundError) as error:
        raise ConfigError(f"{file.url} cannot be downloaded: {error}; {offline}") from error
    except UnavailableError as error:
        raise UnavailableError(f"{file.url} cannot be downloaded: {error}; {offline}") from error
    if fault := _fault(file, data) if data else "it is empty":
        raise ConfigError(f"{file.url} is not the expected file: {fault}; {offline}")
    # The digest comes first, so that no file of a killed download lacks it.
    line = f"{canonical.sha256(data)}  {file.path.name}\n"
    store.write(str(_record(file.path)), line.encode())
    store.write(str(file.path), data)
    return data


def _fault(file: File, data: bytes) -> str | None:
    """Return how bytes differ from the expected ones, or None."""
    if file.sha256 and (found := canonical.sha256(data)) != file.sha256:
        return f"its sha256 is {found}, expected {file.sha256}"
    # The last line may lack its end.
    if (lines := data.count(b"\n") + 1) < file.lines:
        return f"it has {lines} lines, expected at least {file.lines}"
    return None


def _record(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _recorded(path: Path) -> str:
    """Return the digest that was written when the file was downloaded; empty for a file that was not downloaded."""
    try:
        words = _record(path).read_text(encoding="utf-8").split()
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise ConfigError(f"{_record(path)} cannot be read: {error}; delete it") from error
    return words[0] if words else "nothing"
