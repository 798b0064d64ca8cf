"""Delete files of a run that belong to no artifact."""

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from cosmos_rl_core.errors import LeaseError, NoSpaceError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.lease import PATIENCE_S
from flows.defaults import GRACE_H
from flows.devices import work_folders
from flows.lineage.forks import forks_of, refers
from flows.planning.base import AnyRun
from flows.planning.steps import read_run
from flows.post_train import steps
from stages.artifacts.garbage import garbage

HOUR_S = 3600.0


@dataclass(frozen=True)
class Files:
    """Number and size of the files of one stage, or of another place."""

    name: str
    files: int
    bytes: int


@dataclass(frozen=True)
class Garbage:
    """Files of a run that belong to no artifact."""

    run: str
    """Id of the run."""
    url: str
    deleted: bool
    """Whether the files were deleted; False after ``--dry-run``."""
    older_than_h: float
    stages: list[Files]
    """Deleted files of ended attempts, by stage; the last entries are half-written files of ended processes."""
    folders: list[Files]
    """Deleted folders of ended flows on this machine."""
    kept: list[Files]
    """Files of attempts that may still run."""
    bytes: int
    """Size in bytes of the files that were deleted or would be."""

    def lines(self) -> Iterator[str]:
        """Yield the lines to print."""
        found = self.stages + self.folders
        for each in found:
            yield f"{each.name:<28} {each.files:>6} files {each.bytes / 1e6:>12.1f} MB"
        freed = f"{'freed' if self.deleted else 'would free'} {self.bytes / 1e6:.1f} MB"
        yield freed if found else f"nothing to delete in {self.url}"
        for each in self.kept:
            yield (
                f"kept {each.files} files, {each.bytes / 1e6:.1f} MB, of {each.name}: a stage that wrote less than "
                f"{self.older_than_h:g} h ago may still run; --older-than 0 deletes them too"
            )


def gc(store_url: str, run_id: str, *, superseded: bool, dry_run: bool, older_than_h: float = GRACE_H) -> Garbage:
    """Delete files of the run that belong to no artifact; with ``dry_run`` only count them.

    A stage may outlive its flow, so an attempt that wrote less than ``older_than_h`` hours ago by the store's clock
    keeps its files. With ``superseded`` the files of generations that were made again go too, unless a fork refers to
    them. Runs share datasets and this machine's temporary folder: files there that may be another run's are deleted
    only once they are older than ``GRACE_H``.

    Raises :class:`LeaseError` while a process works on the run.
    """
    run = read_run(store_url, run_id)
    found: list[Files] = []
    kept: list[Files] = []
    with _alone(run) as check:
        before_s = store.clock_s(run.url) - HOUR_S * older_than_h
        every_fork = [*forks_of(run.url)]
        for step in (step for step in steps(run) if step.slot.startswith(run.url)):
            referred = partial(refers, every_fork, step.slot)
            free = garbage(step.slot, superseded=superseded, before_s=before_s, referred=referred)
            check()
            found += _deleted(step.name, step.slot, free.old, dry_run=dry_run)
            kept += _files(step.name, free.young.values())
        datasets = store.join(store.absolute(store_url), "dataset")
        longest_s = before_s - HOUR_S * max(0.0, GRACE_H - older_than_h)
        for name, url, end_s in (("", run.url, before_s), (" in dataset/", datasets, longest_s)):
            half = store.abandoned(url).items()
            sizes = {path: entry.size for path, entry in half if entry.written_s <= end_s}
            found += _deleted(f"half-written{name}", url, sizes, dry_run=dry_run)
    folders = _folders(run.url, older_than_h, dry_run=dry_run)
    total = sum(each.bytes for each in (*found, *folders))
    return Garbage(run_id, run.url, not dry_run, older_than_h, found, folders, kept, total)


def _deleted(name: str, url: str, sizes: Mapping[str, int], *, dry_run: bool) -> list[Files]:
    """Delete the files below ``url``, unless ``dry_run`` is set. Return their number and size."""
    for path in () if dry_run else sizes:
        store.remove(store.join(url, path))
    return _files(name, sizes.values())


def _files(name: str, sizes: Collection[int]) -> list[Files]:
    return [Files(name, len(sizes), sum(sizes))] if sizes else []


@contextmanager
def _alone(run: AnyRun) -> Iterator[Callable[[], None]]:
    """Hold the run's lease. Yield a check that raises :class:`LeaseError` if another process works on the run.

    On a full disk no process can write a lease, so this process continues without one.
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


def _folders(run_url: str, older_than_h: float, *, dry_run: bool) -> list[Files]:
    """Delete the folders that ended flows left on this machine. Return their number and size."""
    found = work_folders.abandoned(run_url, HOUR_S * older_than_h, HOUR_S * max(GRACE_H, older_than_h))
    for folder in () if dry_run else found:
        shutil.rmtree(folder, ignore_errors=True)
    return _files(f"folders in {next(iter(found)).parent}" if found else "", found.values())
