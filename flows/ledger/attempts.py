"""Attempts at stages that left no artifact, and why: from the ledger of a run, with the last words of their logs."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from cosmos_rl_core.storage import store
from flows.ledger.causes import cause
from flows.ledger.costs import Startup, name_of, startup_of
from flows.ledger.pages import Entry, Page, entries, pages

LOGS = "logs"
"""Folder of a slot with the logs of its attempts."""
_LOG = re.compile(r"\d{8}T\d{6}-.+\.log")


def logs_of(slot: str) -> list[str]:
    """Return the names of the logs in a slot, which begin with the times when attempts ended; the newest comes last.

    Other files in the folder, as of an editor or a file manager, are left out.
    """
    return sorted(filter(_LOG.fullmatch, store.names(store.join(slot, LOGS))))


@dataclass(frozen=True)
class Logged:
    """The logs of one slot."""

    name: str
    """Name of the slot, for people."""
    stage: str
    """Row of the cost table that counts the slot's attempts."""
    left: int = 0
    """Attempts that left a log and no artifact."""
    last: str = ""
    """Last line of the newest of these logs; "" if it says nothing."""


@dataclass(frozen=True)
class Left:
    """Attempts at one stage that left no artifact, for one cause."""

    name: str
    stage: str
    count: int
    why: str
    recorded: bool = True
    """Whether the ledger has them."""


@dataclass
class Attempts:
    """The attempts of a run, from its ledger. Only the newest page is read more than once."""

    run_url: str
    newest: Page | None = None
    """The newest page, whose totals are the run's; None before there is a ledger."""
    _earlier: list[Entry] = field(default_factory=list[Entry])
    """Entries of the pages before the newest one."""

    def look(self) -> None:
        """Read what was written since the last look. Raises :class:`ArtifactError` if a page is damaged or missing."""
        first = 0 if self.newest is None else self.newest.number
        found = list(pages(self.run_url, first=first))
        self._earlier += entries(found[:-1])
        self.newest = found[-1] if found else self.newest

    @property
    def every(self) -> list[Entry]:
        """Return all attempts, in order."""
        return [*self._earlier, *(() if self.newest is None else self.newest.entries)]

    def startups(self) -> dict[str, Startup]:
        """Return the start-up of the attempts at each stage, by its row of the cost table."""
        found: dict[str, Startup] = {}
        for entry in self.every:
            name = name_of(entry)
            found[name] = found.get(name, Startup()).plus(startup_of([entry]))
        return found

    def at_work(self, wave: str) -> int:
        """Return the number of attempts that work now, in the ``wave`` that a process works on."""
        return sum(entry.outcome == "open" for entry in self._newest_of(wave))

    def left(self, logged: Mapping[str, Logged], wave: str = "") -> Iterator[Left]:
        """Yield the attempts that left no artifact, by stage and cause, without the attempts at work in ``wave``.

        ``logged`` has slots by their places in the store, in the order of the loop. Attempts that left only a log are
        older than the ledger; in slots that runs share, other runs may have made them.
        """
        failed = self._all_failed(wave)
        for place in dict.fromkeys([*logged, *failed]):
            some = failed.get(place, [])
            logs = logged[place] if place in logged else Logged(named(place, some[0].stage), name_of(some[0]))
            yield from _by_cause(logs, some)
            others = logs.left - len(some)
            if others > 0 and (self.newest is None or place.startswith("runs/")):
                yield Left(logs.name, logs.stage, others, _unrecorded(logs, self.newest), recorded=False)

    def _all_failed(self, wave: str) -> dict[str, list[Entry]]:
        found: dict[str, list[Entry]] = {}
        for entry in self._earlier:
            if entry.failed:
                found.setdefault(entry.slot, []).append(entry)
        working = bool(self._newest_of(wave))
        for entry in () if self.newest is None else self.newest.entries:
            if entry.failed and not (working and entry.outcome == "open"):
                found.setdefault(entry.slot, []).append(entry)
        return found

    def _newest_of(self, wave: str) -> tuple[Entry, ...]:
        return self.newest.entries if self.newest is not None and self.newest.wave == wave else ()


def _by_cause(logs: Logged, some: list[Entry]) -> Iterator[Left]:
    """Yield attempts at one stage by cause. If the newest failed by itself, the last line of its log is added.

    The log of an attempt that hung ends with the stacks of its processes, which are no cause.
    """
    causes = [cause(entry) for entry in some]
    if logs.left and some[-1:] and some[-1].outcome not in ("open", "stopped", "hung"):
        causes[-1] += f"; its log ends: {logs.last}" if logs.last else "; its log says nothing"
    for why, alike in groupby(causes):
        yield Left(logs.name, logs.stage, len(list(alike)), why)


def _unrecorded(logs: Logged, ledger: Page | None) -> str:
    if ledger is None:
        return logs.last or "not known: its log says nothing"
    return "not in the ledger; " + (f"its log ends: {logs.last}" if logs.last else "its log says nothing")


def named(place: str, stage: str) -> str:
    """Return the name of a slot for people, such as ``iteration-0003/update``; the stage for a slot that runs share."""
    if not place.startswith("runs/"):
        return stage
    name = place.split("/", 2)[-1]
    return name.replace("iterations/", "iteration-", 1).replace("exports/", "policy-", 1)
