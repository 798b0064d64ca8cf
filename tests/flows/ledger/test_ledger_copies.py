"""Copies of the pages of a ledger, by which a store is asked once for many pages."""

import time
from pathlib import Path

import pytest

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import store
from flows.auditing.audit import audit
from flows.ledger import pages
from flows.ledger.ledger import Ledger
from flows.ledger.pages import BOUND, Page
from flows.planning.run import Run
from tests.flows.ledger.test_ledger import entry
from tests.hand_made import planned

PAGES = 2 * BOUND + 5


@pytest.fixture
def run(recipe, tmp_path: Path) -> Run:
    return planned(recipe(), tmp_path, run_id="hand")


def write(run: Run, count: int) -> None:
    """Write so many pages, as one process does."""
    ledger = Ledger(run.url, "shape", [].append)
    for number in range(count):
        page, found = ledger.page(f"iteration-{number:04d}/update", time.monotonic()), [entry("update", "s", 1.0)]
        page.turn(lambda found=found: found)
        page.close(found)


def singly(run: Run) -> list[Page]:
    """All pages, none of them from a copy."""
    return list(pages.pages(run.url, pages.numbers(run.url)))


@pytest.mark.parametrize("first", [PAGES, 3, BOUND])
def test_pages_that_nobody_writes_again_are_copied_also_by_a_process_that_goes_on(run: Run, first: int):
    write(run, first)
    write(run, PAGES - first)
    assert pages.copies(run.url) == [0, 1]
    assert list(pages.pages(run.url)) == singly(run)
    for number in range(2):
        copied = pages.bound(singly(run)[number * BOUND : (number + 1) * BOUND])
        assert store.read(pages.url_of_copy(run.url, number)) == copied


def test_pages_are_read_from_copies_or_singly_if_copies_are_missing_or_damaged(run: Run):
    write(run, PAGES)
    every, url = singly(run), pages.url_of(run.url, 3)
    data, copy = store.read(url), pages.url_of_copy(run.url, 0)
    kept = store.read(copy)
    store.write(url, b"{}")
    assert list(pages.pages(run.url)) == every
    assert list(pages.pages(run.url, first=5)) == every[5:]
    for damaged in (kept[:-1], kept + b"\n", b"", store.read(pages.url_of_copy(run.url, 1))):
        store.write(copy, damaged)
        with pytest.raises(ArtifactError, match=r"00003\.json"):
            list(pages.pages(run.url))
        store.write(url, data)
        assert list(pages.pages(run.url)) == every
        store.write(url, b"{}")
    store.remove(copy)
    with pytest.raises(ArtifactError, match=r"00003\.json"):
        list(pages.pages(run.url))


def test_an_audit_compares_copies_with_their_pages(run: Run):
    write(run, PAGES)

    def faults() -> set[tuple[str, str]]:
        return {(fault.file, fault.field) for fault in audit(run.store_url, "hand").faults if "bound" in fault.file}

    assert faults() == set()
    copy = pages.url_of_copy(run.url, 1)
    store.write(copy, store.read(pages.url_of_copy(run.url, 0)))
    assert faults() == {("runs/hand/ledger/bound-00001.jsonl", "bytes")}
