"""Heads of a run: write-once records that name every record of its artifacts, each with the digest of the head before.

A person who keeps the digest of one head can show later whether anything up to it was edited, even if every digest
inside the store was computed again.
"""

from collections.abc import Iterable, Iterator
from itertools import count

from pydantic import Field

from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import unseal
from flows.ledger.pages import numbers
from flows.ledger.pages import url_of as page_url
from flows.planning.base import AnyRun
from flows.planning.plan import PLAN_FILE
from flows.planning.versions import KIND as VERSIONS
from flows.running.wave import NUMERICS, SCORERS
from flows.warning.decisions import DECISIONS
from stages.artifacts.manifest import Manifest
from stages.artifacts.records import Dropped, Invalidated, Layout, Sealed, parsed, place_of, records_in

HEADS = "heads"
"""Name of the folder of a run that has its heads."""
BLOCK = 16
"""Number of heads that are read in parallel."""


class Head(Sealed):
    """One head: the records that are new since the head before it."""

    kind = "head"
    run: str
    """The run's folder in its store."""
    number: int = Field(ge=0)
    previous: str | None
    """Digest of the bytes of the head before it; None for the first."""
    iteration: int | None
    """The iteration that ended; None at the end of the run."""
    records: dict[str, str]
    """Digests of records by their path in the store. A record is written once, so no later head names another."""


def url_of(run_url: str, number: int) -> str:
    """Return the URL of a head of a run."""
    return store.join(run_url, HEADS, f"{number:05d}.json")


def number_in(name: str, ending: str) -> int | None:
    """Return the number in the file name of a head; None if it is no such name."""
    digits = name.removesuffix(ending)
    return int(digits) if digits.isdecimal() and f"{int(digits):05d}{ending}" == name else None


def read_heads(run_url: str) -> Iterator[tuple[Head, str]]:
    """Yield the heads of a run in order, each with its digest.

    Raises :class:`ArtifactError` if one is damaged, of another run, or does not continue the one before it.
    """
    previous: str | None = None
    for start in count(0, BLOCK):
        numbers = range(start, start + BLOCK)
        for number, data in store.ahead(numbers, lambda number: store.read_if_exists(url_of(run_url, number))):
            if data is None:
                return
            url = url_of(run_url, number)
            head = parsed(Head, unseal(data, Head.kind, url), url)
            if (head.run, head.number, head.previous) != (place_of(run_url), number, previous):
                raise ArtifactError(
                    f"{url} is head {head.number} of {head.run} and does not continue head {number - 1}"
                )
            previous = sha256(data)
            yield head, previous


class Heads:
    """The heads of a run at work: :meth:`add` takes new artifacts, :meth:`write` names them in a head."""

    def __init__(self, run: AnyRun) -> None:
        """Read the heads that exist. Raises like :func:`read_heads`."""
        self._run = run
        self._number, self._previous, self._pages = 0, None, 0
        self._known: dict[str, str] = {}
        self._slots: dict[str, None] = {}
        for head, found in read_heads(run.url):
            self._number, self._previous = head.number + 1, found
            self._known |= head.records
        if run.plan.origin is not None and not self._known:
            self.touch(store.join(run.url, slot) for slot in slots_in(run.url))

    def add(self, manifests: Iterable[Manifest]) -> None:
        """Remember the slots of artifacts that no head names yet."""
        for made in manifests:
            if self._known.get(self._path(Manifest.url(made.slot, made.generation))) != made.digest:
                self._slots[made.slot] = None

    def touch(self, slots: Iterable[str]) -> None:
        """Remember slots that have lost parts."""
        self._slots |= dict.fromkeys(slots)

    def write(self, iteration: int | None) -> None:
        """Write a head that names every record which no earlier head names. If there is none, write nothing.

        ``iteration`` is the one that ended, None at the end of the run. After an iteration without new artifacts, no
        head is written either, and other new records wait for the next head.
        Raises :class:`ArtifactError` if another process has written this head.
        """
        if iteration is not None and self._known and not self._slots:
            return
        found = {self._path(url): url for slot in self._slots for url in records_of(slot)}
        found |= {self._path(url): url for url in run_records(self._run.url)}
        plan = store.join(self._run.url, PLAN_FILE)
        if not self._known and store.size(plan) is not None:
            found[self._path(plan)] = plan
        # The stages of these pages have ended, so nobody writes them again.
        every = [number for number in numbers(self._run.url) if number >= self._pages]
        self._pages = max(every, default=-1) + 1 or self._pages
        found |= {self._path(url): url for url in (page_url(self._run.url, number) for number in every)}
        new = {path: sha256(store.read(url)) for path, url in found.items() if path not in self._known}
        self._slots.clear()
        if not new:
            return
        head = Head(
            run=place_of(self._run.url),
            number=self._number,
            previous=self._previous,
            iteration=iteration,
            records=dict(sorted(new.items())),
        )
        data = head.sealed()
        if not store.put_if_absent(url_of(self._run.url, self._number), data):
            raise ArtifactError(f"{url_of(self._run.url, self._number)} was written by another process meanwhile")
        self._number, self._previous = self._number + 1, sha256(data)
        self._known |= new

    def _path(self, url: str) -> str:
        return place_of(url)


def slots_in(run_url: str) -> list[str]:
    """Return the slots of a run that have an artifact, below its folder, by a listing."""
    names = (name.rpartition("/") for name in store.listed(run_url))
    return sorted({folder for folder, _, name in names if name.startswith(f"{Manifest.kind}.")})


def run_records(run_url: str) -> Iterator[str]:
    """Yield the URLs of the records next to a run's plan: settings it continued with, numerics, scorers of services."""
    yield from (store.join(run_url, name) for name in sorted(store.names(run_url)) if name.startswith(f"{VERSIONS}."))
    for folder in (NUMERICS, SCORERS):
        url = store.join(run_url, folder)
        yield from (store.join(url, name) for name in sorted(store.names(url)) if name.endswith(".json"))


def records_of(slot: str) -> Iterator[str]:
    """Yield the URLs of a slot's records: of its generations, of deleted parts, of finished shards, of decisions."""
    names = store.names(slot)
    kinds = tuple(f"{kind.kind}." for kind in (Manifest, Layout, Invalidated, Dropped))
    yield from (store.join(slot, name) for name in sorted(names) if name.startswith(kinds))
    for parent in (store.join(slot, "shards"), store.join(slot, DECISIONS)):
        yield from (store.join(parent, folder, name) for folder, name in records_in(parent))
