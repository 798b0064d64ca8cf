"""Files of a run that no record names.

Such a file is a fault if it passes for a part of the run: it lies in the folder of a current artifact, or has the name
of a record. Files that processes leave behind are no faults: folders of other attempts, logs, leases. All other files
are listed.

Listings are made before slots are read. A file that is written later is in no listing, and a record is written after
the files that it names.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import count

from cosmos_rl_core.errors import counted
from cosmos_rl_core.storage import store
from flows.auditing.checks.faults import Findings
from flows.auditing.slot import Slot
from flows.heads.heads import HEADS
from flows.heads.signatures import SIGNATURE
from flows.ledger.pages import LEDGER
from flows.lineage.forks import FORKS
from flows.planning.plan import METRICS_FILE, PLAN_FILE
from flows.planning.versions import KIND as VERSIONS
from flows.reporting.derived import FILE as DERIVED
from flows.rescoring.record import FILE as RESCORED
from flows.rescoring.record import NUMBERS, RESCORE
from flows.running.progress import FILE as PROGRESS
from flows.running.wave import NUMERICS, SCORERS
from flows.terminal.commands import COMMAND
from flows.warning.decisions import DECISIONS
from stages.artifacts.garbage import RENEWED
from stages.artifacts.manifest import Manifest
from stages.artifacts.records import Dropped, Invalidated, Layout, is_record
from stages.reporting.contracts import Report
from stages.scoring.shards import AHEAD

UNNAMED = "nothing names it; look where it comes from, and remove it"
_RECORDS = tuple(f"{kind.kind}." for kind in (Manifest, Layout, Invalidated, Dropped))
_OF_SLOT = ("attempts/", "logs/", f"{AHEAD}/")
"""Folders of a slot whose files no manifest names: other attempts, logs, and scores that were made ahead."""
_OF_RECORDS = ("shards", DECISIONS)
"""Folders with folders of records, which are read: markers by :class:`Slot`, decisions on warnings."""
_OF_RUN = (PLAN_FILE, METRICS_FILE, PROGRESS, DERIVED, f"{COMMAND}.json")
_OF_RESCORE = (RESCORED, Report.PAGE, NUMBERS, PROGRESS)
_FOLDERS = ("lease/", ".probe/", "steps/")
_NUMBERED = re.compile(rf"{LEDGER}/\d{{5,}}\.json|{LEDGER}/bound-\d{{5,}}\.jsonl|({NUMERICS}|{SCORERS})/[^/]+\.json")
_NUMBERED_OF_RUN = re.compile(rf"{HEADS}/\d{{5,}}\.json|{FORKS}/[^/]+\.json")
_IN_RESCORE = re.compile(rf"{RESCORE}/[^/]+/")
_DEPTHS = {"iterations": 3, "exports": 3} | dict.fromkeys((HEADS, LEDGER, NUMERICS, SCORERS, FORKS), 2) | {RESCORE: 5}
"""Depth to which files are listed one by one, by the folder of a run."""


class Listings:
    """The names of all files in the run and the slots that an audit reads. :meth:`add` a slot before it is read."""

    def __init__(self, run_url: str, *, whole: bool) -> None:
        """List the files of the run, if ``whole``."""
        self._run_url = run_url
        self._run = names_under(run_url) if whole else None
        self._slots: dict[str, list[str]] = {}

    def add(self, url: str) -> None:
        """List the files of a slot, unless they are listed already."""
        if self._run is None or not self._is_own(url):
            self._slots[url] = names_under(url)

    def check(self, slots: Mapping[str, Slot], findings: Findings) -> None:
        """Compare listings with the files that records name. Of slots of other runs, only faults are added."""
        if self._run is not None:
            check_run(self._run_url, self._run, slots, findings)
        for url, names in self._slots.items():
            found = list(check_slot(slots[url], names, findings))
            if self._is_own(url):
                add_unknown(url, found, findings)

    def _is_own(self, url: str) -> bool:
        return url.startswith(f"{self._run_url}/")


def names_under(url: str) -> list[str]:
    """Return the names of all files under ``url``, sorted, without files that are being written."""
    return sorted(name for name in store.listed(url) if not store.is_temporary(name))


def check_slot(slot: Slot, names: Iterable[str], findings: Findings) -> Iterator[str]:
    """Add a fault for each file that passes for a part of a slot's artifact; yield other files that nothing names."""
    made = slot.current
    own = "" if made is None else f"attempts/{made.attempt}/"
    for name in names:
        if name in slot.records or name in slot.entries:
            continue
        if made is not None and name.startswith(own):
            # A shard that another attempt finished first leaves a file of the same name.
            wrong = name.removeprefix(own) not in made.files
        else:
            wrong = "/" not in name and name.startswith(_RECORDS)
        if wrong:
            findings.add(store.join(slot.url, name), "file", UNNAMED)
        elif not name.startswith(_OF_SLOT) and not _is_of_stage(slot.url.rpartition("/")[2], name):
            yield name


def _is_of_stage(stage: str, name: str) -> bool:
    folder, *inside = name.split("/")
    if folder in _OF_RECORDS and (folder != DECISIONS or stage == "warn"):
        return len(inside) == 2 and "." not in inside[0] and is_record(inside[1])
    return name == RENEWED or (stage == "report" and name == Report.PAGE)


def check_run(run_url: str, names: Iterable[str], slots: Mapping[str, Slot], findings: Findings) -> None:
    """Compare all files of a run with the files that its records and slots name. ``slots`` are by URL."""
    of_slots: dict[str, list[str]] = {}
    others: list[str] = []
    for name in names:
        url = next((url for url in _folders(run_url, name) if url in slots), None)
        if url is None:
            others.append(name)
        else:
            of_slots.setdefault(url, []).append(f"{run_url}/{name}".removeprefix(f"{url}/"))
    add_unknown(run_url, _others(run_url, others, findings), findings)
    for url, some in of_slots.items():
        add_unknown(url, check_slot(slots[url], some, findings), findings)
    findings.unknown.sort()


def _folders(run_url: str, name: str) -> Iterator[str]:
    parts = name.split("/")
    yield from (store.join(run_url, *parts[:length]) for length in range(1, len(parts)))


def _others(run_url: str, names: list[str], findings: Findings) -> Iterator[str]:
    """Yield files outside of slots that nothing names. Records of versions after a missing number are faults."""
    there = {*names}
    records = {f"{VERSIONS}.{number}.json" for number in _consecutive(there)}
    for name in names:
        inside = _IN_RESCORE.sub("", name, count=1) if _IN_RESCORE.match(name) else ""
        own = inside or name
        if own.startswith(_FOLDERS) or _NUMBERED.fullmatch(own) or inside in _OF_RESCORE:
            continue
        if name in records or name in _OF_RUN or _NUMBERED_OF_RUN.fullmatch(name):
            continue
        folder, _, last = name.rpartition("/")
        if folder == HEADS and (SIGNATURE.fullmatch(last) or last.endswith(".json")):
            continue  # looked at with the heads
        if not folder and name.startswith(f"{VERSIONS}."):
            findings.add(store.join(run_url, name), "file", UNNAMED)
        else:
            yield name


def _consecutive(names: set[str]) -> Iterator[int]:
    for number in count(1):
        if f"{VERSIONS}.{number}.json" not in names:
            return
        yield number


def add_unknown(url: str, names: Iterable[str], findings: Findings) -> None:
    """Add files under ``url`` that nothing names to the findings, one line for each folder."""
    found = Counter[str]()
    for name in names:
        parts = name.split("/")
        below = _DEPTHS.get(parts[0], 1)
        found[name if len(parts) <= below else "/".join([*parts[:below], ""])] += 1
    for name, number in sorted(found.items()):
        many = f" ({counted(number, 'file')})" if name.endswith("/") else ""
        findings.unknown.append(f"{findings.place(store.join(url, name))}{many}")
