"""The ledger of a run at work: the one process that holds the run's lease writes its pages here."""

import sys
import time
from collections.abc import Callable, Sequence
from functools import cached_property

from cosmos_rl_core.errors import ArtifactError, CosmosRLError
from cosmos_rl_core.storage import store
from flows.ledger.pages import (
    BOUND,
    Entry,
    Page,
    Totals,
    bound,
    newest_page,
    pages,
    some_pages,
    url_of,
    url_of_copy,
)
from stages.artifacts.records import place_of

BEAT_S = 10.0
"""Seconds between two writings of an open page: a killed flow loses at most as many seconds of its attempts."""


class Ledger:
    """The pages of a run. The newest one may be open."""

    def __init__(self, run_url: str, shape: str, note: Callable[[str], None]) -> None:
        """Read the newest page. Raises :class:`ArtifactError` if it is damaged."""
        self.shape = shape
        self._run_url, self._note = run_url, note
        self._newest = newest_page(run_url)
        self._first = 0 if self._newest is None else self._newest.number
        self._closed: dict[int, float] = {}
        """Device seconds of iterations, in the pages from number ``_first`` on, without the newest page."""
        self._unbound: dict[int, Page] = {}
        """Pages that this process wrote and nobody writes again, since the last copy."""

    @property
    def totals(self) -> Totals:
        """Return the sums over all pages that were written."""
        return Totals() if self._newest is None else self._newest.totals

    @property
    def iterations(self) -> dict[int, float]:
        """Return the device seconds of the newest iterations, by their numbers."""
        found = dict(self._earlier)
        for k, device_s in self._closed.items():
            found[k] = found.get(k, 0.0) + device_s
        if self._newest is not None:
            _count(self._newest, found)
        return found

    @cached_property
    def _earlier(self) -> dict[int, float]:
        """Return the same for pages before ``_first``. Read on demand: only a limit of device hours asks for them."""
        found: dict[int, float] = {}
        for page in some_pages(self._run_url):
            if page.number < self._first:
                _count(page, found)
        return found

    def page(self, wave: str, asked_s: float) -> "OpenPage":
        """Return a page for a wave that was asked for at ``asked_s`` of the monotonic clock. Writes nothing yet."""
        began = time.time() - (time.monotonic() - asked_s)
        first = Page(
            run=place_of(self._run_url),
            number=0 if self._newest is None else self._newest.number + 1,
            shape=self.shape,
            wave=wave,
            began=round(began, 3),
            wall_s=0.0,
            state="open",
            before=self.totals,
            entries=(),
        )
        return OpenPage(self, first, asked_s)

    def begin(self, page: Page) -> None:
        """Write a new page. Raises :class:`UnavailableError` like every writer of the store."""
        url = url_of(self._run_url, page.number)
        if not store.put_if_absent(url, page.sealed()):
            raise ArtifactError(f"{url} was written by another process meanwhile")
        if self._newest is not None:
            _count(self._newest, self._closed)
            self._unbound[self._newest.number] = self._newest
        self._newest = page
        if page.number and page.number % BOUND == 0:
            self._bind(range(page.number - BOUND, page.number))

    def _bind(self, which: range) -> None:
        """Write one copy of several pages, so that one request reads them."""
        unread = [number for number in which if number not in self._unbound]
        try:
            self._unbound |= {page.number: page for page in pages(self._run_url, unread)}
            copy = bound(self._unbound[number] for number in which)
            store.write(url_of_copy(self._run_url, which[0] // BOUND), copy)
        except CosmosRLError as error:
            self._note(f"pages {which[0]} to {which[-1]} of the ledger have no copy: {error}")
        self._unbound.clear()

    def update(self, page: Page) -> None:
        """Write the newest page again. If that fails, only the ledger lacks its newest times."""
        try:
            store.write(url_of(self._run_url, page.number), page.sealed())
            self._newest = page
        except CosmosRLError as error:
            self._note(f"the ledger lacks the newest times of {page.wave}: {error}")


def _count(page: Page, found: dict[int, float]) -> None:
    if page.iteration is not None:
        found[page.iteration] = found.get(page.iteration, 0.0) + page.device_s


class OpenPage:
    """A page whose attempts work."""

    def __init__(self, ledger: Ledger, page: Page, asked_s: float) -> None:
        self._ledger, self._page, self._asked_s = ledger, page, asked_s
        self._written_s: float | None = None

    def turn(self, found: Callable[[], Sequence[Entry]]) -> None:
        """Write the entries at first, and then every :data:`BEAT_S` seconds. Cheap enough to call many times."""
        now_s = time.monotonic()
        if self._written_s is None:
            self._ledger.begin(self._with(found()))
        elif now_s - self._written_s > BEAT_S:
            self._ledger.update(self._with(found()))
        else:
            return
        self._written_s = now_s

    def close(self, found: Sequence[Entry]) -> None:
        """Write the entries for the last time; nothing if no attempt was ever written.

        Entries of attempts that the flow stopped get the exception that is being raised, so call this in a ``finally``.
        """
        if self._written_s is None:
            return
        error = sys.exception()
        why = "" if error is None else str(error) or type(error).__name__
        told = [one.model_copy(update={"why": why}) if one.outcome == "stopped" else one for one in found]
        self._ledger.update(self._with(told).model_copy(update={"state": "closed"}))

    def _with(self, found: Sequence[Entry]) -> Page:
        wall_s = round(time.monotonic() - self._asked_s, 3)
        return self._page.model_copy(update={"entries": tuple(found), "wall_s": wall_s})
