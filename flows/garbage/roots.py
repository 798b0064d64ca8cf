"""Roots of a store's prepared data: its snapshots and runs, and the slots that they read below ``dataset/``."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import RESTORE, unseal
from cosmos_rl_core.storage.store import Listed
from flows.checking.checks import BEFORE_A_PLAN
from flows.planning import kinds
from flows.planning.base import AnyRun
from flows.planning.plan import PLAN_FILE, run_url
from flows.planning.steps import read_run
from flows.post_train import post_train
from stages.artifacts import snapshots
from stages.artifacts.garbage import erasable
from stages.artifacts.manifest import Manifest
from stages.artifacts.records import place_of
from stages.artifacts.slots import named_manifest
from stages.artifacts.snapshots import Snapshot
from stages.registry import STAGES

MANIFEST = re.compile(r"manifest\.([1-9][0-9]*)\.json")
_SLOT = re.compile(r"[0-9a-f]{64}")
_SNAPSHOT = re.compile(r"([^/]+)/snapshots/([1-9][0-9]*)\.json")
Numbers = dict[str, list[int]]
"""Numbers of snapshots by dataset."""


class Roots:
    """Slots that snapshots and runs reach. A slot that was reached once stays in the set."""

    def __init__(self, store_url: str, numbers: Mapping[str, Sequence[int]], keep: int, *, dry_run: bool) -> None:
        self.slots: set[str] = set()
        """Names of slots below ``dataset/`` that are reached."""
        self.cannot_run: list[str] = []
        self._store_url, self._numbers, self._keep = store_url, numbers, keep
        self._dry_run = dry_run
        self._newest = {dataset: found[-1] for dataset, found in numbers.items()}
        self._pins: set[tuple[str, int]] = set()
        self._read: set[str] = set()

    def look(self) -> None:
        """Add the slots of the plans and snapshots that are new since the last look.

        Raises :class:`ArtifactError` or :class:`ConfigError` if one cannot be read.
        """
        for name in sorted(store.names(store.join(store.absolute(self._store_url), "runs")) - self._read):
            try:
                if self._is_planned(name):
                    self.add(read_run(self._store_url, name))
                    self._read.add(name)
            except (ArtifactError, ConfigError) as error:
                raise type(error)(
                    f"nothing is deleted while it is not known what the run {name!r} reads: {error}\n"
                    f"mend it, or remove {run_url(self._store_url, name)} if nobody needs the run"
                ) from error
        for dataset in self._newest:
            while (snapshot := Snapshot.read(self._store_url, dataset, self._newest[dataset] + 1)) is not None:
                self._add_snapshot(snapshot)
                self._newest[dataset] = snapshot.number

    def _is_planned(self, name: str) -> bool:
        """Return whether a run has a plan. Raises :class:`ArtifactError` if it has anything else without one."""
        url = run_url(self._store_url, name)
        if store.size(plan := store.join(url, PLAN_FILE)) is not None:
            return True
        # Listed before the plan is looked for again: a run writes its plan before its first other file.
        found = store.names(url) - BEFORE_A_PLAN
        if found and store.size(plan) is None:
            raise ArtifactError(f"{plan} is missing, but there is {min(found)}; {RESTORE}")
        return bool(found)

    def add(self, run: AnyRun) -> None:
        """Add the slots that a run reads. Take back a removal of its snapshots, unless a file of them is gone."""
        pins = {(pinned.dataset, pinned.number) for pinned in run.plan.snapshots}
        if not all(self._is_there(*pin) for pin in pins):
            self.cannot_run.append(run.plan.run_id)
            return
        self._pins |= pins
        self._add(_read_by(run))

    def _is_there(self, dataset: str, number: int) -> bool:
        if not snapshots.is_removed(self._store_url, dataset, number):
            return True
        snapshot = Snapshot.read(self._store_url, dataset, number, removed=True)
        if self._dry_run or snapshot is None:
            return False
        try:
            # Manifests are deleted first, so an artifact with a manifest has all its files.
            for source in (*snapshot.parts, *snapshot.captions):
                named_manifest(source)
        except ArtifactError:
            return False
        snapshots.take_back(self._store_url, dataset, number)
        return True

    def old_snapshots(self, listing: Mapping[str, Listed], before_s: float) -> Numbers:
        """Return the snapshots that may be removed, by dataset, and add the slots that the others reach.

        A snapshot that was the newest after ``before_s`` stays, because a run may be planned on it now.
        """
        old: Numbers = defaultdict(list)
        for dataset, numbers in self._numbers.items():
            for number in numbers:
                if snapshots.is_removed(self._store_url, dataset, number):
                    continue
                snapshot = Snapshot.read(self._store_url, dataset, number)
                assert snapshot is not None
                following = listing.get(_file_of(dataset, number + 1))
                recent = following is None or following.written_s > before_s or number > numbers[-1] - self._keep
                if recent or (dataset, number) in self._pins:
                    self._add_snapshot(snapshot)
                else:
                    old[dataset].append(number)
        return dict(old)

    def remove(self, old: Numbers) -> Numbers:
        """Remove the snapshots that no run has pinned meanwhile. Return the removed snapshots."""
        every = [(dataset, number) for dataset, numbers in old.items() for number in numbers]
        for one in every:
            snapshots.remove(self._store_url, *one)
        self.look()
        removed: Numbers = defaultdict(list)
        for dataset, number in every:
            if snapshots.is_removed(self._store_url, dataset, number):
                removed[dataset].append(number)
        return dict(removed)

    def wants(self, name: str) -> bool:
        """Return whether a slot is reached now."""
        self.look()
        return name in self.slots

    def _add_snapshot(self, snapshot: Snapshot) -> None:
        self._add(source.url for source in (*snapshot.parts, *snapshot.captions))

    def _add(self, urls: Iterable[str]) -> None:
        # By places, because the store may have been moved since these URLs were written.
        places = (place_of(url).split("/") for url in urls)
        self.slots |= {place[1] for place in places if place[0] == "dataset"}


def _read_by(run: AnyRun) -> Iterator[str]:
    """Yield the slots outside of its folder that a run reads."""

    def never(k: int) -> bool:
        return False

    for wave in post_train(run, never, never):
        yield from (step.slot for step in wave.steps if not step.slot.startswith(f"{run.url}/"))
    if (kind := kinds.of(run.plan)) is not None:
        yield from kind.reads(run)
    yield from (source.url for source in run.plan.init_inputs)
    for pinned in run.plan.snapshots:
        snapshot = pinned.read(run.store_url)
        yield from (source.url for source in (*snapshot.parts, *snapshot.captions))
    versions = {name: STAGES[name].version for name in ("embed", "encode")}
    if versions.items() <= run.plan.stage_versions.items():
        return
    # Settings of another version may have had other fields, and so another slot. Artifacts name the slots they read.
    for name in store.listed(run.url):
        if MANIFEST.fullmatch(name.rpartition("/")[2]):
            body = unseal(store.read(url := store.join(run.url, name)), Manifest.kind, url)
            yield from (source["url"] for some in body.get("inputs", {}).values() for source in some)


def numbers_of(root: str, listing: Mapping[str, Listed]) -> dict[str, list[int]]:
    """Return the snapshots of each dataset. Raises :class:`ArtifactError` if one before the newest is missing."""
    found: dict[str, list[int]] = defaultdict(list)
    for match in filter(None, map(_SNAPSHOT.fullmatch, listing)):
        found[match[1]].append(int(match[2]))
    for dataset, numbers in found.items():
        numbers.sort()
        if missing := sorted({*range(1, numbers[-1])} - {*numbers}):
            first, newest = (store.join(root, _file_of(dataset, number)) for number in (missing[0], numbers[-1]))
            raise ArtifactError(f"{first} is missing, but there is {newest}; {RESTORE}; nothing was deleted")
    return dict(found)


def slots_in(listing: Mapping[str, Listed]) -> dict[str, dict[str, Listed]]:
    """Return the files of each slot that can be deleted as a whole. Leave out slots with only ends of generations."""
    found: dict[str, dict[str, Listed]] = defaultdict(dict)
    for path, entry in listing.items():
        folder, _, name = path.partition("/")
        if _SLOT.fullmatch(folder):
            found[folder][name] = entry
    return {slot: files for slot, every in found.items() if (files := erasable(every))}


def _file_of(dataset: str, number: int) -> str:
    return f"{dataset}/snapshots/{number}.json"
