"""Delete files of a run that no artifact holds."""

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
    """Files of one stage, or of another place."""

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
    """Files of ended attempts; the last entries are half-written files of ended processes."""
    folders: list[OfStage]
    """Folders of ended flows on this machine."""
    kept: list[OfStage]
    """Files of attempts that may still run."""
    ordered: dict[str, str]
    """Mailbox, by stage, of an allocation that makes or reads the stage. Such a stage keeps all its files."""

    @property
    def total(self) -> int:
        """Return the bytes that were deleted or would be."""
        return sum(each.bytes for each in (*self.stages, *self.folders))

    def lines(self) -> list[str]:
        """Return the lines to print."""
        found = self.stages + self.folders
        lines = [f"{each.name:<28} {each.files:>6} files {each.bytes / 1e6:>12.1f} MB" for each in found]
        freed = f"{'freed' if self.deleted else 'would free'} {self.total / 1e6:.1f} MB"
        lines.append(freed if lines else f"nothing to delete in {self.url}")
        if self.kept:
            files, size = sum(each.files for each in self.kept), sum(each.bytes for each in self.kept) / 1e6
            names = ", ".join(each.name for each in self.kept)
            lines.append(
                f"kept {files} files, {size:.1f} MB, of {names}: a stage that wrote less than {self.older_than_h:g} h "
                "ago may still run; --older-than 0 deletes them too"
            )
        return lines + [
            f"kept all of {name}: {mailbox} has an unfinished order; remove the mailbox if its job has ended"
            for name, mailbox in self.ordered.items()
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the fields and ``bytes``, the size of what was deleted or would be, for scripts."""
        return {**asdict(self), "bytes": self.total}


def gc(store_url: str, run_id: str, *, superseded: bool, dry_run: bool, older_than_h: float = GRACE_H) -> Garbage:
    """Delete files of the run that no artifact holds; with ``dry_run`` only find them.

    A stage may outlive its flow, so an attempt that wrote less than ``older_than_h`` hours ago by the store's clock
    keeps its files. So does a stage that an allocation has orders for. With ``superseded`` the files of generations
    that were made again go too. Runs share datasets: only half-written files older than ``GRACE_H`` are deleted there.

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
    """Hold the run's lease. Yield a check that raises :class:`LeaseError` if another process works on the run.

    On a full disk no process can write a lease, so this one continues without.
    """

    def require_nobody(patience_s: float = 0.0) -> None:
        if (holder := run.holder(patience_s)) is not None:
            raise LeaseError(
                f"another process works on {run.url}: pid {holder['pid']} on {holder['host']}; wait until it ends"
            )

    with ExitStack() as held:
        try:
            check = held.enter_context(run.lease()).check
        except NoSpaceError:
            require_nobody(PATIENCE_S)
            check = require_nobody
        yield check


def _ordered(run: Run) -> dict[str, str]:
    """Return the slots that unfinished orders of the run's allocations make or read, with the mailbox of each."""
    places = [run.url, run.recipe.launch.slurm.work_dir]
    found: dict[str, str] = {}
    for root in {store.join(store.absolute(place), "allocations") for place in places if place is not None}:
        for mailbox in (Mailbox(store.join(root, name)) for name in store.names(root)):
            for order in mailbox.orders().orders:
                if mailbox.returncode(order) is None:
                    # Not parsed as a Request: another run's may name plugins that are not imported here.
                    request = json.loads(order.request)
                    read = [source["url"] for role in request["inputs"].values() for source in role]
                    found |= dict.fromkeys([request["slot"], *read], mailbox.url)
    return found


def _delete(slot: str, found: Mapping[str, int], *, superseded: bool, before_s: float) -> None:
    """Delete the files, except those that an artifact holds by now or that were written since."""
    again = garbage(slot, superseded=superseded, before_s=before_s).old
    for name in found.keys() & again.keys():
        store.remove(store.join(slot, name))


def _half_written(url: str, before_s: float, *, dry_run: bool) -> dict[str, int]:
    """Delete files that an ended process left half-written before that time. Return their sizes."""
    found = {name: entry.size for name, entry in store.abandoned(url).items() if entry.written_s <= before_s}
    for name in () if dry_run else found:
        store.remove(store.join(url, name))
    return found


def _folders(older_than_s: float, *, dry_run: bool) -> list[OfStage]:
    """Delete the folders that ended flows left on this machine. Return their number and size."""
    found = work_folders.abandoned(older_than_s)
    for folder in () if dry_run else found:
        shutil.rmtree(folder, ignore_errors=True)
    place = f"folders in {next(iter(found)).parent}" if found else ""
    return _sums({place: {folder.name: size for folder, size in found.items()}})
