"""Delete a run, unless a process works on it or another run reads its artifacts."""

import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

from cosmos_rl_core.errors import ConfigError, UnreadableError, counted
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.lease import Lease
from flows.checking.checks import misnamed, no_plan
from flows.lineage import forks
from flows.planning.plan import PLAN_FILE, run_url
from flows.rescoring.record import RESCORE, folders
from flows.terminal.commands import about

LEASE = "lease"
SHOWN = 5
"""Largest number of runs that a refusal names."""
_RECORD = re.compile(r"(?:.*/)?manifest\.\d+\.json")


@dataclass(frozen=True)
class Deletion:
    """A run that was deleted or would be, with the number and size of its files."""

    run: str
    store_url: str
    url: str
    files: int
    bytes: int
    deleted: bool

    def lines(self) -> Iterator[str]:
        """Yield the lines to print."""
        did = "deleted" if self.deleted else "would delete"
        yield f"{did} {self.url}: {counted(self.files, 'file')}, {self.bytes / 1e6:.1f} MB"
        if self.deleted:
            collect = about(self.store_url, "data", "gc")
            yield f"data that it shared with others stays in dataset/; `{collect}` deletes what no run reads"


def found(store_url: str, run_id: str) -> Deletion:
    """Return the run and the files that a deletion would delete.

    A run whose plan is missing or damaged can be deleted too. Raises :class:`ConfigError` if there is no such run, or
    if other runs read it.
    """
    if mistakes := misnamed(run_id):
        raise ConfigError(*mistakes)
    url = run_url(store_url, run_id)
    files = store.listed(url)
    if not files and not store.names(url):
        raise no_plan(store.absolute(store_url), run_id, store.join(url, PLAN_FILE))
    if readers := sorted(_readers(store_url, run_id)):
        more = f" and {len(readers) - SHOWN} more" if len(readers) > SHOWN else ""
        raise ConfigError(f"{', '.join(readers[:SHOWN])}{more} read artifacts of {run_id}: delete them first")
    return Deletion(run_id, store_url, url, len(files), sum(entry.size for entry in files.values()), deleted=False)


def delete(store_url: str, run_id: str) -> Deletion:
    """Delete a run. Raises like :func:`found`, and :class:`LeaseError` while a process works on it or a re-score of it.

    The plan is deleted first, so that nobody continues a run that is deleted in part; another deletion takes the rest.
    """
    wanted = found(store_url, run_id)
    with ExitStack() as held:
        rescores = (store.join(wanted.url, RESCORE, folder) for folder in folders(wanted.url))
        leases = [held.enter_context(Lease(store.join(url, LEASE))) for url in (wanted.url, *rescores)]
        store.remove(store.join(wanted.url, PLAN_FILE))
        # Its origins need not keep anything for it any more. Before its files go, because nobody finds a run without.
        runs = wanted.url.rpartition("/")[0]
        for name in store.names(runs):
            forks.forget(store.join(runs, name), run_id)
        for name in store.listed(wanted.url):
            if f"/{LEASE}/" not in f"/{name}":
                for lease in leases:
                    lease.check()
                store.remove(store.join(wanted.url, name))
    for name in store.listed(wanted.url):
        store.remove(store.join(wanted.url, name))
    if "://" not in wanted.url:
        # Only folders are left.
        shutil.rmtree(wanted.url, ignore_errors=True)
    return replace(wanted, deleted=True)


def _readers(store_url: str, run_id: str) -> Iterator[str]:
    """Yield the other runs of the store whose plan or manifests name a place in this run, even if they are damaged."""
    runs, place = store.join(store.absolute(store_url), "runs"), f"runs/{run_id}/".encode()
    for name in store.names(runs) - {run_id}:
        url = store.join(runs, name)
        try:
            listed = store.listed(url)
        except UnreadableError as error:
            raise ConfigError(f"nothing is deleted while it is not known what {name} reads: {error}") from error
        records = [store.join(url, one) for one in listed if one == PLAN_FILE or _RECORD.fullmatch(one)]
        if any(place in (data or b"") for _, data in store.ahead(records, store.read_if_exists)):
            yield name
