"""A lease in the store, so that one process at a time writes to a run.

``<url>/<n>.json`` names the process that took the lease for the n-th time; it is written only if absent, which decides
races. The holder keeps advancing the counter in ``<n>.count``; ``<n>.released`` ends the lease. A process that wants a
held lease watches the counter by its own clock, so no two clocks are compared. ``<n>.stop`` asks the holder to end,
wherever it works. A lease saves work and prevents surprises; artifacts stay correct without it.
"""

import itertools
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from cosmos_rl_core.errors import ArtifactError, CosmosRLError, LeaseError, StoppedError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import seal, unseal

BEAT_S = 2.0
"""Seconds between two advances of the holder's counter."""
PATIENCE_S = 20.0
"""Seconds without an advance after which the holder counts as gone."""

KIND, STOP = "lease", ".stop"
UNKNOWN = {"host": "an unknown machine", "machine": None, "pid": "?", "started": None}
"""The holder of a lease whose record cannot be read."""


class Lease:
    """A lease that is held inside its ``with`` block.

    Entering raises :class:`LeaseError` while another holder's counter advances. It does not wait for a holder that was
    a process of this machine and has ended.
    """

    def __init__(self, url: str, beat_s: float = BEAT_S, patience_s: float = PATIENCE_S) -> None:
        self._url, self._beat_s, self._patience_s = url, beat_s, patience_s
        self._number = 0
        self._left = threading.Event()
        self._successor: dict[str, Any] | None = None
        self._asked_by: str | None = None
        self._beats = threading.Thread(target=self._keep, name="lease", daemon=True)

    def __enter__(self) -> Self:
        newest = _newest(self._url)
        place = _place(self._url, newest)
        if newest and _advances(place, holder := _read(place), self._patience_s):
            raise self._held_by(holder)
        self._number = newest + 1
        place = _place(self._url, self._number)
        if not store.put_if_absent(f"{place}.json", seal(KIND, _this_process())):
            raise self._held_by(_read(place))
        self._beats.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._beats.join()
        # Without this file the next process waits until the counter has stood still for long enough.
        with suppress(CosmosRLError):
            store.write(f"{_place(self._url, self._number)}.released", b"")

    def check(self) -> None:
        """Raise :class:`LeaseError` if another process has the lease now, :class:`StoppedError` if asked to end."""
        if self._successor is not None:
            raise self._held_by(self._successor)
        if self._asked_by is not None:
            raise StoppedError(f"stopped by {self._asked_by}; the same command continues it")

    def _keep(self) -> None:
        place, successor = _place(self._url, self._number), _place(self._url, self._number + 1)
        for count in itertools.count(1):
            try:
                store.write(f"{place}.count", str(count).encode())
                if store.size(f"{successor}.json") is not None:
                    self._successor = _read(successor)
                    return
                if self._asked_by is None and (asked := store.read_if_exists(f"{place}{STOP}")) is not None:
                    self._asked_by = asked.decode(errors="replace")
            except CosmosRLError:
                # The store does not answer, or refuses a token until it is renewed. Meanwhile another process may take
                # the lease; the next beat that reaches the store finds out.
                pass
            if self._left.wait(self._beat_s):
                return

    def _held_by(self, holder: dict[str, Any]) -> LeaseError:
        place, process = self._url.rpartition("/")[0], f"pid {holder['pid']} on {holder['host']}"
        advice = "wait for its end, or end it and give the same command again"
        return LeaseError(f"another process works on {place}: {process}; {advice}")


def holder_of(url: str, patience_s: float = 2 * BEAT_S) -> dict[str, Any] | None:
    """Return ``pid`` and ``host`` of the lease's holder, None if there is none. Write nothing.

    A holder on another machine has ``patience_s`` seconds to advance its counter, so the call may take that long.
    """
    if (newest := _newest(url)) == 0:
        return None
    place = _place(url, newest)
    holder = _read(place)
    works_here = _is_here(holder) and not _has_ended(place, holder)
    if not works_here and not _advances(place, holder, patience_s):
        return None
    return {key: holder[key] for key in ("pid", "host")}


def ask_to_stop(url: str, who: str) -> bool:
    """Ask the lease's newest holder to end, and return whether there is one. The holder notices with its next beat."""
    if (newest := _newest(url)) == 0:
        return False
    store.write(f"{_place(url, newest)}{STOP}", who.encode())
    return True


def _place(url: str, number: int) -> str:
    return store.join(url, str(number))


def _newest(url: str) -> int:
    """Return how often the lease was taken, which is the number of its newest holder."""
    return next(n for n in itertools.count() if store.size(f"{_place(url, n + 1)}.json") is None)


def _advances(place: str, holder: dict[str, Any], patience_s: float) -> bool:
    """Return whether the counter changes within ``patience_s`` seconds; return early if the holder has ended."""
    began_s, count = time.monotonic(), store.read_if_exists(f"{place}.count")
    while time.monotonic() - began_s < patience_s and not _has_ended(place, holder):
        if store.read_if_exists(f"{place}.count") != count:
            return True
        time.sleep(min(BEAT_S, patience_s) / 8)
    return False


def _has_ended(place: str, holder: dict[str, Any]) -> bool:
    """Return whether the lease was released, or its holder was a process of this machine that has ended."""
    if store.size(f"{place}.released") is not None:
        return True
    if not _is_here(holder):
        return False
    # A later process may have the same number, but another start.
    return (started := _started(holder["pid"])) is None or started != holder["started"]


def _is_here(holder: dict[str, Any]) -> bool:
    return holder["machine"] is not None and holder["machine"] == _machine()


def _read(place: str) -> dict[str, Any]:
    """Return the record of a holder; :data:`UNKNOWN` if it cannot be read, so that only the counter decides."""
    data = store.read_if_exists(f"{place}.json")
    try:
        return UNKNOWN if data is None else UNKNOWN | unseal(data, KIND, f"{place}.json")
    except ArtifactError:
        return UNKNOWN


def _this_process() -> dict[str, Any]:
    holder = {"holder": secrets.token_hex(8), "host": socket.gethostname(), "machine": _machine()}
    return holder | {"pid": os.getpid(), "started": _started(os.getpid())}


def _machine() -> str | None:
    """Return an id of the boot and PID namespace, None if the system has none. Process numbers are unique within it."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return None
    return f"{boot.read_text().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"


def _started(pid: int) -> int | None:
    """Return the process's start in ticks since boot, which setting a clock does not change; None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The process's name comes first, in parentheses, and may contain parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])
