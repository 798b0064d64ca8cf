"""One writer at a time, by a lease in the store: a counter that its holder advances. No two clocks are compared.

``<url>/<n>.json`` says who took it, for the n-th time, and decides races because it is written only if absent. The
holder keeps rewriting ``<n>.count``; ``<n>.released`` ends it. Whoever wants a lease that is held watches the counter
by its own clock. A lease saves work and keeps people from surprises; that artifacts are whole never depends on it.
"""

import itertools
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cosmos_rl_core.errors import ArtifactError, CosmosRLError, LeaseError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import seal, unseal

BEAT_S = 2.0
"""How often a holder advances its counter."""
PATIENCE_S = 20.0
"""How long a counter may stand still before its holder counts as gone."""

KIND = "lease"
UNKNOWN: dict[str, Any] = {"host": "an unknown machine", "machine": None, "pid": "?", "started": None}
"""A holder of which nothing can be read."""


class Lease:
    """Held between ``with`` and its end.

    Entering raises :class:`LeaseError` while another holder's counter advances. A holder that is known to be dead,
    because it was a process of this machine, is not waited for.
    """

    def __init__(self, url: str, beat_s: float = BEAT_S, patience_s: float = PATIENCE_S) -> None:
        self._url, self._beat_s, self._patience_s = url, beat_s, patience_s
        self._number = 0
        self._left = threading.Event()
        self._successor: dict[str, Any] | None = None
        self._beats = threading.Thread(target=self._keep, name="lease", daemon=True)

    def __enter__(self) -> Self:
        newest = _newest(self._url)
        if newest:
            self._outlast(newest)
        self._number = newest + 1
        if not store.put_if_absent(self._path(self._number, "json"), seal(KIND, _this_process())):
            raise self._held_by(_read(self._path(self._number, "json")))
        self._beats.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._beats.join()
        # Without this word the next one waits until the counter has stood still for long enough.
        with suppress(CosmosRLError):
            store.write(self._path(self._number, "released"), b"")

    def check(self) -> None:
        """Raise :class:`LeaseError` if another has taken it over."""
        if self._successor is not None:
            raise self._held_by(self._successor)

    def _outlast(self, number: int) -> None:
        """Return when the holder is gone; raise :class:`LeaseError` at the first sign that it is not."""
        holder = _read(self._path(number, "json"))
        began_s, count = time.monotonic(), store.read_if_exists(self._path(number, "count"))
        while store.size(self._path(number, "released")) is None and not _is_dead(holder):
            if store.read_if_exists(self._path(number, "count")) != count:
                raise self._held_by(holder)
            if time.monotonic() - began_s > self._patience_s:
                return
            time.sleep(min(self._beat_s, self._patience_s) / 4)

    def _keep(self) -> None:
        for count in itertools.count(1):
            try:
                store.write(self._path(self._number, "count"), str(count).encode())
                successor = self._path(self._number + 1, "json")
                if store.size(successor) is not None:
                    self._successor = _read(successor)
                    return
            except CosmosRLError:
                # A store that is away, or refuses a token until there is another. Whoever can reach it may take the
                # lease; the next beat that reaches it tells.
                pass
            if self._left.wait(self._beat_s):
                return

    def _path(self, number: int, kind: str) -> str:
        return store.join(self._url, f"{number}.{kind}")

    def _held_by(self, holder: dict[str, Any]) -> LeaseError:
        return LeaseError(
            f"another process works on {self._url.rpartition('/')[0]}: pid {holder['pid']} on {holder['host']}; wait "
            "for its end, or end it and give the same command again"
        )


def holder_of(url: str, patience_s: float = 2 * BEAT_S) -> dict[str, Any] | None:
    """Who holds the lease: ``pid`` and ``host``; None if nobody does. Takes nothing, and writes nothing.

    A holder on another machine has ``patience_s`` to advance its counter, which is what the answer may take.
    """
    newest = _newest(url)
    place = store.join(url, str(newest))
    if newest == 0 or store.size(f"{place}.released") is not None:
        return None
    holder = _read(f"{place}.json")
    shown = {key: holder[key] for key in ("pid", "host")}
    if holder["machine"] is not None and holder["machine"] == _machine():
        return None if _is_dead(holder) else shown
    count, began_s = store.read_if_exists(f"{place}.count"), time.monotonic()
    while time.monotonic() - began_s < patience_s:
        time.sleep(min(BEAT_S, patience_s) / 4)
        if store.read_if_exists(f"{place}.count") != count:
            return shown
    return None


def _newest(url: str) -> int:
    """How often the lease was taken."""
    return next(n for n in itertools.count() if store.size(store.join(url, f"{n + 1}.json")) is None)


def _read(url: str) -> dict[str, Any]:
    """Who took it; :data:`UNKNOWN` where that cannot be read, so that the counter alone says whether it is held."""
    data = store.read_if_exists(url)
    try:
        return UNKNOWN | ({} if data is None else unseal(data, KIND, url))
    except ArtifactError:
        return UNKNOWN


def _this_process() -> dict[str, Any]:
    return {
        "holder": secrets.token_hex(8),
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
    }


def _machine() -> str | None:
    """What processes have in common that see each other's numbers; None where the system does not say."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip()}/{os.stat('/proc/self/ns/pid').st_ino}" if boot.exists() else None


def _is_dead(holder: dict[str, Any]) -> bool:
    """Whether a holder was a process of this machine that is no more."""
    if holder["machine"] is None or holder["machine"] != _machine():
        return False
    return (started := _started(holder["pid"])) is None or started != holder["started"]


def _started(pid: int) -> int | None:
    """When a process began, in ticks since the system did, which no clock that is set changes; None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name before it is in parentheses, and may have any.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])
