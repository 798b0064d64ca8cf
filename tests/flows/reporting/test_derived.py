"""The page and the numbers of a finished run: left as they are while they are current, else made again."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import store
from flows.planning.plan import Settings
from flows.reporting import derived
from flows.terminal import commands
from stages.artifacts.generations import invalidate
from tests.flows.by_hand import validated
from tests.flows.resumed import Resumed
from tests.hand_made import planned

TABLES = (".parquet", "fragment.json")
"""Endings of files that only numbers and pages are made from."""
LOG, LOGGED = "20250131T120000-aaaa.log", "2025-01-31 12:00:00 UTC"
"""The name of a log, and its time as a page shows it."""


@pytest.fixture
def finished(recipe, tmp_path: Path) -> Resumed:
    """A finished run of two iterations, judged at its ends."""
    run = planned(validated(recipe, tmp_path), tmp_path, run_id="hand", iterations=2)
    commands.keep(run, Settings("tiny.toml", run.store_url))
    made = Resumed(run, tmp_path)
    assert not made.go()
    return made


def test_the_page_says_that_a_run_works_from_its_first_stage_on_even_if_it_was_finished(finished):
    assert finished.seen[0] == "Running: 0 of 2"
    assert "" not in finished.seen
    longer = Resumed(finished.run.going_to(3), finished.folder)
    longer.go()
    assert longer.seen[0] == "Running: 2 of 3"


def test_the_command_of_a_finished_run_leaves_its_page_and_numbers_and_reads_no_artifact(finished):
    paths = (finished.page, finished.metrics, finished.record)
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in paths]
    found = finished.read()
    assert [(path.read_bytes(), path.stat().st_mtime_ns) for path in paths] == before
    assert not {name for name in found if name.endswith(TABLES)}
    assert {name for name in found if "/manifest." in name}


def edited(finished: Resumed) -> None:
    """The page says something else."""
    finished.page.write_bytes(finished.page.read_bytes().replace(b"Finished", b"Unfinished"))


def without_page(finished: Resumed) -> None:
    """Somebody removed it."""
    finished.page.unlink()


def other_numbers(finished: Resumed) -> None:
    """One digit of the numbers is another one."""
    data = finished.metrics.read_bytes()
    finished.metrics.write_bytes(data.replace(b"0.", b"1.", 1))


def without_numbers(finished: Resumed) -> None:
    """Somebody removed them."""
    finished.metrics.unlink()


def damaged_record(finished: Resumed) -> None:
    """One byte of the record is another one."""
    data = finished.record.read_bytes()
    finished.record.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])


def record_of_another(finished: Resumed) -> None:
    """The record was written for another run."""
    found = derived.Derived.model_validate({"run": "runs/other", "sources": "", "page": "", "metrics": ""})
    finished.record.write_bytes(found.sealed())


def another_command(finished: Resumed) -> None:
    """The run was continued from another recipe."""
    commands.keep(finished.run, Settings("other.toml", finished.run.store_url))


def a_log_more(finished: Resumed) -> None:
    """An attempt left a log that nobody saw."""
    store.write(store.join(finished.run.slots.iteration(1, "update"), "logs", LOG), b"full\n")


def a_log_of_what_runs_share(finished: Resumed) -> None:
    """An attempt at what runs share left a log that nobody saw."""
    store.write(store.join(finished.run.prepared.embed.slot, "logs", LOG), b"full\n")


def touched(finished: Resumed) -> None:
    """A file of an artifact was written again, with its bytes."""
    os.utime(finished.file(finished.run.slots.iteration(0, "fragment"), "fragment.json"), ns=(1, 1))


def a_page_of_the_ledger(finished: Resumed) -> None:
    """An attempt cost something that nobody saw."""
    store.write(store.join(finished.run.url, "ledger", "00000.json"), b"{}")


CHANGES = (
    edited, without_page, other_numbers, without_numbers, damaged_record, record_of_another, another_command,
    a_log_more, a_log_of_what_runs_share, touched, a_page_of_the_ledger,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_any_changed_source_is_seen_and_page_and_numbers_are_made_again(finished, change: Callable[[Resumed], None]):
    whole = finished.metrics.read_bytes()
    change(finished)
    assert not finished.go()
    page = finished.page.read_text(encoding="utf-8")
    assert "<p>Finished: 2 of 2 iterations are trained" in page
    assert finished.metrics.read_bytes() == whole
    assert ("other.toml" in page) == (change is another_command)
    assert (LOGGED in page) == (change is a_log_more)
    # What is written then is current.
    assert finished.go()


def test_a_page_drawn_by_other_code_is_drawn_again(finished, monkeypatch):
    monkeypatch.setattr(derived, "code", lambda: "other")
    assert not finished.go()
    assert finished.go()


def test_a_table_with_another_byte_is_named_though_the_page_was_current(finished):
    assert finished.go()
    path = finished.file(finished.run.slots.iteration(1, "update"), "metrics.parquet")
    data = path.read_bytes()
    path.write_bytes(data[:9] + bytes([data[9] ^ 1]) + data[10:])
    with pytest.raises(ArtifactError, match=path.name):
        finished.go()
    with pytest.raises(ArtifactError, match=path.name):
        finished.go()


def test_a_page_without_damaged_artifacts_is_never_taken_for_current(finished):
    path = finished.file(finished.run.slots.iteration(1, "fragment"), "fragment.json")
    data = path.read_bytes()
    path.write_bytes(data[:9] + bytes([data[9] ^ 1]) + data[10:])
    assert not finished.go()
    assert not finished.go()
    assert re.search("damaged: .*fragment", finished.page.read_text(encoding="utf-8"))


def test_a_run_that_goes_on_writes_both_and_their_record_at_its_end(finished):
    invalidate(finished.run.slots.iteration(1, "reward-ocr"), 1, "scored by mistake")
    assert not finished.go()
    assert "made again, generation 2: scored by mistake" in finished.page.read_text(encoding="utf-8")
    assert finished.go()
    longer = Resumed(finished.run.going_to(3), finished.folder)
    assert not longer.go()
    assert "<p>Finished: 3 of 3 iterations are trained" in longer.page.read_text(encoding="utf-8")
    assert longer.go()
    # The plan of its earlier end has another page.
    assert not finished.go()
