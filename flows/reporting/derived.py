"""The record of the sources of a finished run's page and numbers: while they are equal, neither is made again.

It is ``derived.json``, next to both, and has the digest of each. One more digest covers everything that they depend on:
the code, the plan, the command, every manifest, and a stamp of every file of the run that was read. If that digest has
changed, or the record is damaged, both are made again.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from cosmos_rl_core.canonical import digest, sha256
from cosmos_rl_core.errors import ArtifactError, CosmosRLError
from cosmos_rl_core.listing.listings import Seen
from cosmos_rl_core.listing.stamps import local_stamps
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import unseal
from flows.ledger.attempts import logs_of
from flows.ledger.pages import url_of as page_of_ledger
from flows.planning.base import AnyRun
from flows.planning.plan import METRICS_FILE
from flows.terminal.commands import kept
from stages.artifacts.manifest import Manifest
from stages.artifacts.records import Sealed, parsed, place_of
from stages.artifacts.slots import one_look
from stages.reporting.contracts import Report

FILE = "derived.json"
"""Name of the record, next to ``plan.json``."""
_PACKAGES = ("flows", "stages", "cosmos_rl_core")
Told = tuple[str, Manifest]
"""A slot, and the artifact in it, which another run may have made."""
Logs = Mapping[str, Sequence[str]]
"""Names of the logs of each slot, by its place in the store."""


class Derived(Sealed):
    """The record of the page and the numbers that a finished run derived from its artifacts."""

    kind = "derived"
    run: str
    """The run's folder in its store."""
    sources: str
    """Digest of everything that it was made from."""
    page: str
    """Digest of the bytes of the page."""
    metrics: str
    """Digest of the bytes of ``metrics.jsonl``."""


class Deriving:
    """The record of a run at work, which is written at its end."""

    def __init__(self, run: AnyRun) -> None:
        self.current = False
        """Whether the page and the numbers were made from everything that is current."""
        self._run = run
        self._told: list[Told] = []
        self._found: tuple[int, str] = 0, ""
        """Number of artifacts that were looked at together, and the digest of all sources of page and numbers."""

    def look(self, told: Sequence[Told]) -> bool:
        """Return whether the run is finished, and its page and numbers are current. ``told`` are all its artifacts.

        Call it inside of ``one_look``, before anything is derived: the next look sees any change that comes after it.
        """
        if self._told or told[-1][0] != self._run.slots.report:
            return False
        self._found = len(told), sources_of(self._run, told, {place_of(slot): logs_of(slot) for slot, _ in told})
        if (found := self._read()) is not None and found.sources == self._found[1]:
            files = {_page_of(self._run): found.page, _metrics_of(self._run): found.metrics}
            self.current = all(_is(url, expected) for url, expected in files.items())
        return self.current

    def add(self, told: Sequence[Told]) -> None:
        """Add artifacts, in the order of the loop."""
        self._told += told

    def close(self, logs: Logs) -> None:
        """Look at the finished run before its page is written; nothing if it was looked at as a whole.

        ``logs`` are the names of logs when each artifact was read; attempts may have added others since.
        """
        if self._found[0] != len(self._told):
            with suppress(CosmosRLError), one_look():
                self._found = len(self._told), sources_of(self._run, self._told, logs)

    def write(self, page: str | None, metrics: str | None) -> None:
        """Write the record of the page and the numbers, by the digests of their bytes; None for a file with gaps.

        A run whose store lacks the record makes both again at its next end.
        """
        sources = "" if self.current else self._found[1]
        if page is not None and metrics is not None and sources:
            made = Derived(run=place_of(self._run.url), sources=sources, page=page, metrics=metrics)
            with suppress(CosmosRLError):
                store.write(self._url, made.sealed())

    @property
    def _url(self) -> str:
        return store.join(self._run.url, FILE)

    def _read(self) -> Derived | None:
        """Return the record; None if it is missing, damaged or of another run."""
        if (data := store.read_if_exists(self._url)) is None:
            return None
        try:
            found = parsed(Derived, unseal(data, Derived.kind, self._url), self._url)
        except ArtifactError:
            return None
        return found if found.run == place_of(self._run.url) else None


def sources_of(run: AnyRun, told: Sequence[Told], logs: Logs) -> str:
    """Return the digest of all that the page and the numbers of a finished run depend on.

    "" in a store that does not tell when its files were written. Call it inside of ``one_look``.
    """
    ledger, page = page_of_ledger(run.url, 0), _page_of(run)
    folders: dict[str, Mapping[str, Seen]] = {}
    for url in (ledger, *(store.join(place, "manifest") for slot, made in told for place in {slot, made.slot})):
        if (found := store.listed_folder(url)) is not None:
            folders.setdefault(*found)
    files = sorted((url, seen.stamp) for some in folders.values() for url, seen in some.items() if url != page)
    if any(stamp.endswith(" inf") for _, stamp in files):
        return ""
    return digest(
        {
            "code": code(),
            "run": run.url,
            "plan": run.plan.model_dump(mode="json"),
            "command": kept(run),
            "manifests": [[place_of(slot), made.slot, made.digest] for slot, made in told],
            "logs": {place: sorted(names) for place, names in logs.items()},
            "files": files,
        }
    )


@cache
def code() -> str:
    """Return a digest of the stamps of the files of this project: every edit draws a page anew."""
    home = Path(__file__).parents[2]
    found = (one for package in _PACKAGES for one in local_stamps(str(home / package), f"{package}/"))
    return digest(sorted((name, stamp) for name, stamp in found if not name.endswith(".pyc")))


def _is(url: str, expected: str) -> bool:
    data = store.read_if_exists(url)
    return data is not None and sha256(data) == expected


def _page_of(run: AnyRun) -> str:
    return store.join(run.slots.report, Report.PAGE)


def _metrics_of(run: AnyRun) -> str:
    return store.join(run.url, METRICS_FILE)
