"""Free what a run no longer needs."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from cosmos_rl_core.errors import LeaseError, NoSpaceError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.lease import PATIENCE_S
from flows.defaults import GRACE_H
from flows.planning.run import Run
from flows.planning.steps import open_run
from flows.post_train import steps
from flows.running import work_folders
from stages.artifacts.garbage import garbage
from stages.execution.mailbox import Mailbox

HOUR_S = 3600.0


@dataclass(frozen=True)
class OfStage:
    """The garbage of one stage."""

    name: str
    files: int
    bytes: int


@dataclass(frozen=True)
class Garbage:
    """Files of a run that no artifact holds."""

    run: str
    """Its id."""
    url: str
    deleted: bool
    """False after ``--dry-run``."""
    older_than_h: float
    stages: list[OfStage]
    """Of attempts that ended; then what was being written when its process ended."""
    folders: list[OfStage]
    """On this machine, of flows that ended."""
    kept: list[OfStage]
    """Of attempts that may be at work."""
    ordered: dict[str, str]
    """By stage, the mailbox whose allocation is to make it, or reads it: nothing of those is garbage."""

    @property
    def total(self) -> int:
        """Bytes that were deleted, or would be."""
        return sum(each.bytes for each in (*self.stages, *self.folders))

    def lines(self) -> list[str]:
        """For people."""
        found = self.stages + self.folders
        lines = [f"{each.name:<28} {each.files:>6} files {each.bytes / 1e6:>12.1f} MB" for each in found]
        freed = f"{'freed' if self.deleted else 'would free'} {self.total / 1e6:.1f} MB"
        lines.append(freed if lines else f"nothing to delete in {self.url}")
        if self.kept:
            files, size = sum(each.files for each in self.kept), sum(each.bytes for each in self.kept) / 1e6
            names = ", ".join(each.name for each in self.kept)
            lines.append(
                f"kept {files} files, {size:.1f} MB, of {names}: a stage that wrote less than {self.older_than_h:g} h "
                "ago may be at work; --older-than 0 deletes them too"
            )
        return lines + [
            f"kept all of {name}: {mailbox} has an order that has not ended; remove it if its job is gone"
            for name, mailbox in self.ordered.items()
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the fields, for scripts, and ``bytes``: what was deleted, or would be."""
        return {**asdict(self), "bytes": self.total}


def gc(store_url: str, run_id: str, *, superseded: bool, dry_run: bool, older_than_h: float = GRACE_H) -> Garbage:
    """Delete files of the run that no artifact holds, or only find them.

    An attempt that wrote something less than ``older_than_h`` hours ago, by the store's clock, may be of a stage that
    outlived its flow, and is left alone; so is what an allocation has orders for. Datasets are shared by runs: only
    what processes left half-written in them goes, and never sooner than after ``GRACE_H``.

    Raises :class:`LeaseError` while a process works on the run.
    """
    run = open_run(store_url, run_id)
    found: dict[str, Mapping[str, int]] = {}
    kept: dict[str, Mapping[str, int]] = {}
    with _alone(run) as check:
        now_s = store.clock_s(run.url)
        before_s, shared_before_s = (now_s - HOUR_S * hours for hours in (older_than_h, max(older_than_h, GRACE_H)))
        mailboxes = _ordered(run)
        own = [step for step in steps(run) if step.slot.startswith(run.url)]
        for step in own:
            if step.slot in mailboxes:
                continue
            free = garbage(step.slot, superseded=superseded, before_s=before_s)
            if free.old and not dry_run:
                check()
                _delete(step.slot, free.old, superseded=superseded, before_s=before_s)
            found[step.name], kept[step.name] = free.old, free.young
        found["half-written"] = _half_written(run.url, before_s, dry_run=dry_run)
        datasets = store.join(store.absolute(run.store_url), "dataset")
        found["half-written in dataset/"] = _half_written(datasets, shared_before_s, dry_run=dry_run)
    folders = _folders(HOUR_S * older_than_h, dry_run=dry_run)
    ordered = {step.name: mailboxes[step.slot] for step in own if step.slot in mailboxes}
    return Garbage(run_id, run.url, not dry_run, older_than_h, _sums(found), folders, _sums(kept), ordered)


def _sums(found: Mapping[str, Mapping[str, int]]) -> list[OfStage]:
    return [OfStage(name, len(sizes), sum(sizes.values())) for name, sizes in found.items() if sizes]


@contextmanager
def _alone(run: Run) -> Iterator[Callable[[], None]]:
    """Hold the run's lease, and give what raises :class:`LeaseError` once another process works on the run.

    Where there is no space left to write the lease, nobody else can write one either until something is deleted.
    """

    def require_nobody(patience_s: float = 0.0) -> None:
        if (holder := run.holder(patience_s)) is not None:
            raise LeaseError(
                f"another process works on {run.url}: pid {holder['pid']} on {holder['host']}; wait for its end"
            )

    with ExitStack() as held:
        try:
            check = held.enter_context(run.lease()).check
        except NoSpaceError:
            require_nobody(PATIENCE_S)
            check = require_nobody
        yield check


def _ordered(run: Run) -> dict[str, str]:
    """Slots that an allocation of the run is to make, or reads for that, with its mailbox."""
    places = [run.url, run.recipe.launch.slurm.work_dir]
    found: dict[str, str] = {}
    for root in {store.join(store.absolute(place), "allocations") for place in places if place is not None}:
        for mailbox in (Mailbox(store.join(root, name)) for name in store.names(root)):
            for order in mailbox.orders().orders:
                if mailbox.returncode(order) is None:
                    # Plain values: another run's Request may name plugins that are not imported here.
                    request = json.loads(order.request)
                    read = [source["url"] for role in request["inputs"].values() for source in role]
                    found |= dict.fromkeys([request["slot"], *read], mailbox.url)
    return found


def _delete(slot: str, found: Mapping[str, int], *, superseded: bool, before_s: float) -> None:
    """Delete what was found, except for what has become part of an artifact or was written since."""
    again = garbage(slot, superseded=superseded, before_s=before_s).old
    for name in found.keys() & again.keys():
        store.remove(store.join(slot, name))


def _half_written(url: str, before_s: float, *, dry_run: bool) -> dict[str, int]:
    """Files that were being written when their processes ended, last written before that time; deletes them."""
    found = {name: entry.size for name, entry in store.abandoned(url).items() if entry.written_s <= before_s}
    for name in () if dry_run else found:
        store.remove(store.join(url, name))
    return found


def _folders(older_than_s: float, *, dry_run: bool) -> list[OfStage]:
    """Folders of this machine that flows which ended left; deletes them."""
    found = work_folders.abandoned(older_than_s)
    for folder in () if dry_run else found:
        shutil.rmtree(folder, ignore_errors=True)
    place = f"folders in {next(iter(found)).parent}" if found else ""
    return _sums({place: {folder.name: size for folder, size in found.items()}})
