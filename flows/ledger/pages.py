"""Pages of a run's ledger: ``ledger/<n>.json``, one for each time that a wave of stages was started.

A page has an entry for each attempt of a stage. It is written when the attempts start and again while they work, so
the seconds of a killed process are counted too. No content digest depends on it; heads name it.

``ledger/bound-<n>.jsonl`` is a copy of :data:`BOUND` pages that nobody writes again, one a line, which one request
reads. If it is missing or damaged, the pages are read one by one.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import Literal, Self

from pydantic import Field

from cosmos_rl_core.config.base import Section
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import RESTORE, unseal
from stages.artifacts.records import Sealed, parsed, place_of
from stages.execution.spending import Crew, Spent

LEDGER = "ledger"
"""Folder of a run with its pages."""
HOUR_S = 3600.0
AT_WORK = "at work"
"""Outcome of an open entry whose process is known to work. It is not stored."""
_PAGE, _COPY = re.compile(r"(\d{5,})\.json"), re.compile(r"bound-(\d{5,})\.jsonl")
BOUND = 32
"""Pages of one copy."""
_EARLIEST, _NEWEST = 16, 64
"""Numbers of first and last pages that :func:`some_pages` reads: the base policy's evaluation, the last iterations."""


class Entry(Section):
    """One attempt of one stage."""

    stage: str
    """Kind of the stage, a key of :data:`stages.registry.STAGES`."""
    slot: str
    """Where its artifact goes, by :func:`stages.artifacts.records.place_of`."""
    devices: int = Field(ge=0)
    """Ranks that compute with torch: GPUs, or processes on a CPU. 0 for a stage without torch."""
    queued_s: float = 0.0
    """Seconds from when the wave was asked for until the attempt began: devices, limits, schedulers, Resume."""
    seconds: float = 0.0
    """Seconds from its begin to its end."""
    outcome: str = "open"
    """``made``; ``stopped`` by its flow; the kind of its failure; ``open`` while it works, or if its flow was killed
    then."""
    why: str = ""
    """What stopped its flow, the message or else the class of an exception; "" if it is not known, and for any other
    outcome than ``stopped``."""
    spent: Spent = Spent()
    """Seconds and bytes that its process reported last."""
    crew: Crew | None = None
    """The workers of the stage, if it was elastic."""

    @property
    def device_s(self) -> float:
        """Return the device seconds of the attempt. Each worker counts ``devices`` for as long as it worked."""
        return self.devices * (self.seconds if self.crew is None else self.crew.worker_s)

    @property
    def startup_s(self) -> float | None:
        """Return the seconds of its process before the first step of its work; None if it never reported any."""
        spent = self.spent
        return spent.interpreter_s + spent.imports_s + spent.load_s if spent.seconds else None

    @property
    def outside_s(self) -> float:
        """Return the seconds before its process began and after its last report."""
        return max(0.0, self.seconds - self.spent.seconds)

    @property
    def failed(self) -> bool:
        """Return whether it left no artifact: it failed, was stopped, or its flow was killed."""
        return self.outcome not in ("made", AT_WORK)


class Totals(Section):
    """Sums over entries."""

    attempts: int = 0
    failed: int = 0
    process_s: float = 0.0
    """Sum of the seconds of all attempts, also of attempts at the same time."""
    device_s: float = 0.0
    wall_s: float = 0.0
    """Seconds of all waves, with their queues."""
    iterations_s: float = 0.0
    """Part of ``wall_s`` that waves of iterations took."""
    iterations_device_s: float = 0.0
    """Part of ``device_s`` that waves of iterations took."""
    read_bytes: int = 0
    written_bytes: int = 0

    def plus(self, page: "Page") -> "Totals":
        """Return the sums with one more page."""
        device_s, inside = page.device_s, page.iteration is not None
        return Totals(
            attempts=self.attempts + len(page.entries),
            failed=self.failed + sum(entry.failed for entry in page.entries),
            process_s=round(self.process_s + sum(entry.seconds for entry in page.entries), 3),
            device_s=round(self.device_s + device_s, 3),
            wall_s=round(self.wall_s + page.wall_s, 3),
            iterations_s=round(self.iterations_s + page.wall_s * inside, 3),
            iterations_device_s=round(self.iterations_device_s + device_s * inside, 3),
            read_bytes=self.read_bytes + sum(entry.spent.read_bytes for entry in page.entries),
            written_bytes=self.written_bytes + sum(entry.spent.written_bytes for entry in page.entries),
        )


class Page(Sealed):
    """The attempts of one wave that were started together."""

    kind = "ledger"
    run: str
    """The run's folder in its store."""
    number: int = Field(ge=0)
    shape: str
    """Digest that is equal in runs whose stages do equal work on equal numbers of ranks."""
    wave: str
    """Name of the wave, such as ``iteration-0003/reward-jpeg+reward-ocr``."""
    began: float
    """Time at which the wave was asked for, in seconds since 1970."""
    wall_s: float
    """Seconds from ``began`` to the end of the last attempt."""
    state: Literal["open", "closed"]
    """``open`` until all attempts have ended; for good if the flow was killed before that."""
    before: Totals
    """Sums over all pages before this one."""
    entries: tuple[Entry, ...]

    @property
    def iteration(self) -> int | None:
        """Return the iteration that the wave is part of; None for the start, evaluations and the end."""
        return iteration_of(self.wave)

    @property
    def device_s(self) -> float:
        """Return the device seconds of all attempts of the page."""
        return sum(entry.device_s for entry in self.entries)

    @property
    def totals(self) -> Totals:
        """Return the sums over all pages up to this one."""
        return self.before.plus(self)

    @classmethod
    def unsealed(cls, data: bytes, run_url: str, number: int) -> Self:
        """Return the page that ``data`` holds. Raises :class:`ArtifactError` if it is damaged or another page."""
        url = url_of(run_url, number)
        page = parsed(cls, unseal(data, cls.kind, url), url)
        if (page.run, page.number) != (place_of(run_url), number):
            raise ArtifactError(f"{url} was written as page {page.number} of {page.run}; {RESTORE}")
        return page


def marked(found: Sequence[Page], wave: str) -> list[Page]:
    """Return pages, with open attempts of the newest marked as at work if it is of the ``wave`` at work."""
    if not found or not wave or found[-1].wave != wave:
        return list(found)
    newest = found[-1]
    told = (one.model_copy(update={"outcome": AT_WORK}) if one.outcome == "open" else one for one in newest.entries)
    return [*found[:-1], newest.model_copy(update={"entries": tuple(told)})]


def iteration_of(wave: str) -> int | None:
    """Return the iteration that a wave is part of; None for any other wave."""
    parent, slash, _ = wave.partition("/")
    number = parent.removeprefix("iteration-")
    return int(number) if slash and number != parent and number.isdecimal() else None


def work_of(wave: str) -> str:
    """Return the name of a wave without number of iteration or policy: ``iteration/rollout``, ``policy/export``."""
    parent, slash, stages = wave.rpartition("/")
    return f"{parent.partition('-')[0]}{slash}{stages}"


def url_of(run_url: str, number: int) -> str:
    """Return the URL of a page of a run."""
    return store.join(run_url, LEDGER, f"{number:05d}.json")


def numbers(run_url: str) -> list[int]:
    """Return the numbers of all pages of a run, in order."""
    return _numbers(_names(run_url), _PAGE)


def copies(run_url: str) -> list[int]:
    """Return the numbers of the copies of a run's pages, in order."""
    return _numbers(_names(run_url), _COPY)


def url_of_copy(run_url: str, number: int) -> str:
    """Return the URL of the copy of a run's pages from ``BOUND * number`` on."""
    return store.join(run_url, LEDGER, f"bound-{number:05d}.jsonl")


def bound(copied: Iterable[Page]) -> bytes:
    """Return the bytes of a copy of pages."""
    return b"\n".join(page.sealed() for page in copied)


def _names(run_url: str) -> Iterable[str]:
    return store.names(store.join(run_url, LEDGER))


def _numbers(names: Iterable[str], pattern: re.Pattern[str]) -> list[int]:
    return sorted(int(found[1]) for found in map(pattern.fullmatch, names) if found is not None)


def pages(run_url: str, which: Sequence[int] | None = None, *, first: int = 0) -> Iterator[Page]:
    """Yield pages of a run in order, by default all from ``first`` on.

    Pages that are not named one by one are read from a copy if there is one. Raises :class:`ArtifactError` if a page
    is damaged or missing.
    """
    names = _names(run_url) if which is None else ()
    copied = {*_numbers(names, _COPY)}
    wanted = [number for number in _numbers(names, _PAGE) if number >= first] if which is None else which
    blocks = [[*some] for _, some in groupby(wanted, lambda number: number // BOUND)]
    asked: list[list[int]] = []
    for block in blocks:
        together = len(block) == BOUND and block[0] // BOUND in copied
        asked += [block] if together else [[number] for number in block]

    def one(number: int) -> Page:
        data = store.read_if_exists(url_of(run_url, number))
        if data is None:
            raise ArtifactError(f"{url_of(run_url, number)} is missing, but there are later pages; {RESTORE}")
        return Page.unsealed(data, run_url, number)

    def read(place: int) -> list[Page]:
        some = asked[place]
        found = _copied(run_url, some) if len(some) == BOUND else None
        return [one(number) for number in some] if found is None else found

    yield from chain.from_iterable(found for _, found in store.ahead(range(len(asked)), read))


def _copied(run_url: str, which: Sequence[int]) -> list[Page] | None:
    """Return pages from their copy; None if it does not have exactly these."""
    data = store.read_if_exists(url_of_copy(run_url, which[0] // BOUND)) or b""
    try:
        return [Page.unsealed(line, run_url, n) for line, n in zip(data.split(b"\n"), which, strict=True)]
    except (ArtifactError, ValueError):
        return None


def newest_page(run_url: str) -> Page | None:
    """Return the newest page of a run, whose totals are the run's; None without any."""
    return next(pages(run_url, numbers(run_url)[-1:]), None)


def some_pages(run_url: str) -> list[Page]:
    """Return the first and the last pages of a run: enough for its times, at a cost that does not grow with it."""
    every = numbers(run_url)
    return list(pages(run_url, [*every[:_EARLIEST], *every[_EARLIEST:][-_NEWEST:]]))


def entries(found: Iterable[Page]) -> Iterator[Entry]:
    """Yield the entries of pages."""
    return chain.from_iterable(page.entries for page in found)
