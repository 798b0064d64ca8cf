"""Delete prepared data that no run and no snapshot reads: parts, captions, embeddings and latents below ``dataset/``.

Roots are the newest snapshots of each dataset and every plan of the store. Runs and preparations may work meanwhile:

- A run writes its plan before it looks for an artifact. The deletion first ends a generation, then reads the plans
  again, then deletes files. So either it sees the plan and keeps the files, or the run sees the end and makes the
  artifact again.
- A run reads its snapshot after it has written its plan. The deletion first records the removal of a snapshot, then
  reads the plans again. So either it takes the record back, or the run is refused at its beginning.
- A preparation names a part in a snapshot only after it has made the part. A new part is younger than the grace period;
  an existing part gets a new date (:func:`stages.artifacts.garbage.renew`) before the preparation looks for it.
- An embedding names its texts in a layout before it looks for their files (:mod:`stages.artifacts.pool`). The deletion
  first announces a sweep, then reads all layouts and indexes, then deletes files. So either it sees the names, or the
  stage sees the sweep and is tried again.
- A part of a dataset names the pictures of its items only at its end. Before, it has written each of them or given it a
  new date (:func:`stages.artifacts.pool.put_picture`). The deletion keeps files that are younger than the grace period
  or were written again since the listing. Looks and writes of the stage see a sweep, as in an embedding.
- One process at a time deletes: it holds a lease.

Not covered: a preparation that takes longer than the grace period from a part to its snapshot; a store whose listings
lag behind its writes; Requests made by hand, and runs of other stores that read this one; and a run that continues past
its planned iterations. Shared embeddings of the later iterations may be deleted between its look and its read; the run
makes them again when its command is given again.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Literal

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.lease import Lease
from cosmos_rl_core.storage.store import Listed
from flows.defaults import GRACE_H, SNAPSHOTS_KEPT
from flows.garbage.pool import Pool, files_of
from flows.garbage.roots import MANIFEST, Numbers, Roots, numbers_of, slots_in
from flows.garbage.run import HOUR_S
from flows.planning.plan import Settings, plan_of
from flows.planning.run import run_of
from stages.artifacts.garbage import erase, garbage, is_young
from stages.artifacts.slots import read_manifest

FILES = "files of texts and references"
Fate = Literal["unused", "young", "used"]


@dataclass(frozen=True)
class Row:
    """Files of one kind with one fate."""

    fate: Fate
    """``unused`` is deleted; ``young`` is unused too, but was written within the grace period."""
    what: str
    """Stage of the artifacts, or another name for the files."""
    artifacts: int
    files: int
    bytes: int


@dataclass(frozen=True)
class DatasetGarbage:
    """Prepared data of a store, divided by whether anything reads it."""

    url: str
    deleted: bool
    """False after ``--dry-run``."""
    older_than_h: float
    rows: list[Row]
    removed: Numbers
    """Snapshots that were removed, or would be without ``--dry-run``."""
    cannot_run: list[str]
    """Runs that were planned on a snapshot while it was removed."""

    @property
    def bytes(self) -> int:
        """Return the size in bytes of the files that were deleted or would be."""
        return sum(row.bytes for row in self.rows if row.fate == "unused")

    def lines(self) -> Iterator[Any]:
        """Yield lines to print, after a table if there are any files."""
        if self.rows:
            yield self._table()
        for dataset, numbers in self.removed.items():
            yield f"{'removed' if self.deleted else 'would remove'} snapshots of {dataset}: {_ranges(numbers)}"
        for run in self.cannot_run:
            yield f"run {run} was planned on a removed snapshot and cannot run: remove its folder, use another --run-id"
        freed = f"{'freed' if self.deleted else 'would free'} {self.bytes / 1e6:.1f} MB"
        yield freed if self.bytes or self.removed else f"nothing to delete in {self.url}"

    def _table(self) -> Any:
        rich = import_module("rich.table")
        numbers = (rich.Column(title, justify="right") for title in ("artifacts", "files", "MB"))
        table = rich.Table("", "", *numbers, box=None, pad_edge=False, header_style="bold")
        words = {
            "unused": "deleted" if self.deleted else "would delete",
            "young": f"kept until {self.older_than_h:g} h old",
            "used": "kept",
        }
        for row in self.rows:
            count = str(row.artifacts) if row.artifacts else ""
            table.add_row(words[row.fate], row.what, count, str(row.files), f"{row.bytes / 1e6:.1f}")
        return table


def gc_datasets(
    store_url: str,
    *,
    keep: int = SNAPSHOTS_KEPT,
    recipes: Sequence[str] = (),
    dry_run: bool = False,
    older_than_h: float = GRACE_H,
) -> DatasetGarbage:
    """Delete data that neither the ``keep`` newest snapshots of a dataset nor a plan reach; count it if ``dry_run``.

    Data that ``recipes`` would read of the newest snapshots stays too. Files written less than ``older_than_h`` hours
    ago by the store's clock stay, and so does a snapshot that was the newest within this time. Attempts that left no
    artifact lose their files in slots that stay; half-written files of ended processes stay for ``GRACE_H`` at least.

    Raises :class:`ArtifactError` or :class:`ConfigError`, and deletes nothing, if a plan or a snapshot cannot be read;
    :class:`LeaseError` if another process does the same.
    """
    store.check_readable(store_url)
    root = store.join(store.absolute(store_url), "dataset")
    if not store.names(root):
        return DatasetGarbage(root, not dry_run, older_than_h, [], {}, [])
    with ExitStack() as held:
        check = (lambda: None) if dry_run else held.enter_context(Lease(store.join(root, "lease"))).check
        now_s = store.clock_s(root)
        before_s = now_s - HOUR_S * older_than_h
        listing = store.listed(root)
        roots = Roots(store_url, numbers_of(root, listing), keep, dry_run=dry_run)
        for recipe in recipes:
            roots.add(run_of(plan_of(Settings(recipe, store_url)), store_url))
        roots.look()
        removed = roots.old_snapshots(listing, before_s)
        work = _Work(root, listing, roots, before_s, dry_run=dry_run, check=check)
        if not dry_run:
            check()
            removed = roots.remove(removed)
        work.free_slots()
        work.free_pool()
        half = _half_written(root, min(before_s, now_s - HOUR_S * GRACE_H))
        work.tally.add("unused", "half-written", _deleted(root, half, dry_run=dry_run))
    return DatasetGarbage(root, not dry_run, older_than_h, work.tally.rows(), removed, roots.cannot_run)


class _Work:
    """Slots and pool of a store, to be freed. The constructor reads all records, so that damage is found first."""

    def __init__(
        self,
        root: str,
        listing: Mapping[str, Listed],
        roots: Roots,
        before_s: float,
        *,
        dry_run: bool,
        check: Callable[[], None],
    ) -> None:
        self.tally = _Tally()
        self._root, self._listing, self._roots, self._before_s = root, listing, roots, before_s
        self._dry_run, self._check = dry_run, check
        self._slots = slots_in(listing)
        live = {slot: store.join(root, slot) for slot in self._slots if slot in roots.slots}
        self._dead = {slot: garbage(url, superseded=False, before_s=before_s).old for slot, url in live.items()}
        stay = {slot: files for slot, files in self._slots.items() if slot in live or is_young(files, before_s)}
        self._pool = Pool(root)
        self._unnamed = self._pool.unnamed(listing, stay)

    def free_slots(self) -> None:
        """Delete artifacts that nothing reaches, and dead attempts at others."""
        for slot, files in sorted(self._slots.items()):
            url = store.join(self._root, slot)
            stage, sizes = _stage_of(url, files), {name: entry.size for name, entry in files.items()}
            if slot in self._roots.slots:
                gone = self._dead.get(slot, {})
                self.tally.add("unused", f"dead attempts at {stage}", _deleted(url, gone, dry_run=self._dry_run))
                self.tally.add("used", stage, {name: sizes[name] for name in sizes.keys() - gone.keys()}, 1)
                continue
            if is_young(files, self._before_s):
                self.tally.add("young", stage, sizes, 1)
                continue
            self._check()
            wanted = partial(self._roots.wants, slot)
            erased = sizes if self._dry_run else erase(url, before_s=self._before_s, wanted=wanted)
            self.tally.add("unused" if erased else "used", stage, erased or sizes, 1)

    def free_pool(self) -> None:
        """Delete files of texts and references that no artifact names."""
        sizes = {path: self._listing[path].size for path in files_of(self._listing)}
        old = {path: sizes[path] for path in self._unnamed if self._listing[path].written_s <= self._before_s}
        self._check()
        gone = old if self._dry_run else self._pool.sweep(old, self._listing)
        young = self._unnamed - old.keys()
        self.tally.add("unused", FILES, gone)
        self.tally.add("young", FILES, {path: sizes[path] for path in young})
        self.tally.add("used", FILES, {path: sizes[path] for path in sizes.keys() - gone.keys() - young})


class _Tally:
    """Numbers of artifacts, files and bytes by fate and kind."""

    def __init__(self) -> None:
        self._counts: dict[tuple[Fate, str], list[int]] = defaultdict(lambda: [0, 0, 0])

    def add(self, fate: Fate, what: str, sizes: Mapping[str, int], artifacts: int = 0) -> None:
        """Count files with these sizes, of ``artifacts`` artifacts. Do nothing without files."""
        if sizes:
            counts = self._counts[fate, what]
            counts[:] = map(sum, zip(counts, (artifacts, len(sizes), sum(sizes.values())), strict=True))

    def rows(self) -> list[Row]:
        """Return a row for each fate and kind, ``unused`` first."""
        order = ("unused", "young", "used")
        places = sorted(self._counts, key=lambda place: (order.index(place[0]), place[1]))
        return [Row(*place, *self._counts[place]) for place in places]


def _deleted(url: str, sizes: Mapping[str, int], *, dry_run: bool) -> Mapping[str, int]:
    """Delete files, unless ``dry_run`` is set. Return their sizes."""
    for name in () if dry_run else sizes:
        store.remove(store.join(url, name))
    return sizes


def _half_written(root: str, before_s: float) -> dict[str, int]:
    """Return sizes of half-written files from before ``before_s``: processes without this lease write here too."""
    found = store.abandoned(root).items()
    return {name: entry.size for name, entry in found if entry.written_s <= before_s}


def _stage_of(slot: str, names: Iterable[str]) -> str:
    """Return the stage of a slot's newest artifact, else ``damaged`` or ``unfinished``."""
    generations = [int(match[1]) for match in map(MANIFEST.fullmatch, names) if match]
    try:
        manifest = read_manifest(slot, max(generations)) if generations else None
    except ArtifactError:
        return "damaged"
    return manifest.stage if manifest else "unfinished"


def _ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers in words, with neighbours as a range: ``1 to 3, 5``."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ", ".join(" to ".join(map(str, one)) for one in ranges)
