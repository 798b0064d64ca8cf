"""The page at a run's address: a changed byte of it is found, and what cannot be compared is said."""

import re
import shutil
from pathlib import Path

import pytest

from cosmos_rl_core.errors import StageError
from cosmos_rl_core.storage import store
from flows.auditing.audit import audit
from flows.auditing.checks import page
from flows.auditing.checks.faults import Findings
from flows.library import open_run
from flows.library.opened_run import OpenedRun
from flows.planning.base import AnyRun
from flows.planning.plan import Settings
from flows.planning.run import Run
from flows.planning.steps import read_run
from flows.reporting import writing
from flows.reporting.report import write_report
from flows.session import loop
from flows.terminal import commands
from stages.artifacts.generations import invalidate
from stages.artifacts.slots import current_of
from stages.contracts import METRICS
from tests.flows.by_hand import recipe_in, validated
from tests.flows.imagined import Imagined
from tests.hand_made import planned


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a finished run."""
    folder = tmp_path_factory.mktemp("finished")
    go(planned(validated(recipe_in(folder), folder), folder, run_id="hand", iterations=2), folder)
    return folder / "store"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> AnyRun:
    """The finished run, in a store of the test's own."""
    return read_run(str(shutil.copytree(finished, tmp_path / "store")), "hand")


def go(run: AnyRun, folder: Path, stop_at: str = "", error: BaseException | None = None) -> None:
    imagined, notes = Imagined(run, folder), list[str]()
    if error is not None:
        imagined.stop_at[stop_at] = error
    with writing.Pages(run, notes.append) as pages:
        imagined.done = pages.done
        loop.make(run, imagined.launch)
    assert notes == []


def told(run: AnyRun) -> tuple[list[str], list[str]]:
    """Faults of the page, and reasons why it was not compared."""
    found = Findings(run.store_url)
    page.check(run, OpenedRun(run).steps, found)
    return [f"{one.field}: {one.what}" for one in found.faults], found.unchecked


def change(run: Run, old: str, new: str) -> None:
    written = store.read(writing.address(run)).decode()
    assert old in written
    store.write(writing.address(run), written.replace(old, new, 1).encode())


def test_each_changed_byte_of_the_page_is_found(run: Run):
    assert told(run) == ([], [])
    written = store.read(writing.address(run))
    words = (b"<!doctype", b"max-width", b"Held-out", b"data:image", b'id="lineage"', b"<footer>", b"addEventListener")
    for place in [written.index(word) + 3 for word in words]:
        store.write(writing.address(run), written[:place] + bytes([written[place] ^ 1]) + written[place + 1 :])
        assert len(told(run)[0]) == 1, written[place - 3 : place + 9]
    for other in (written + b"x", written[:-1], b"anything", b""):
        store.write(writing.address(run), other)
        assert len(told(run)[0]) == 1
    # The whole audit says so too.
    (fault,) = (one for one in audit(run.store_url, "hand").faults if one.file.endswith("report/index.html"))
    assert fault.field == "page"
    store.write(writing.address(run), written)
    assert told(run) == ([], [])


def test_the_fault_shows_the_line_and_what_to_do(run: Run):
    change(run, "2 iterations trained", "3 iterations trained")
    (fault,), _ = told(run)
    assert fault.startswith("page: line ")
    assert "3 iterations trained" in fault
    assert "2 iterations trained" in fault
    assert f"`cosmos-flows report hand --store {run.store_url}` writes it anew" in fault
    write_report(open_run("hand", run.store_url))
    assert told(run) == ([], [])


def test_a_page_that_is_missing_is_a_fault_of_a_run_by_its_command(run: Run):
    """Stages that are made alone write none."""
    store.remove(writing.address(run))
    assert told(run) == ([], [])
    commands.keep(run, Settings("tiny.toml", run.store_url))
    anew = f"`cosmos-flows report hand --store {run.store_url}` writes it anew"
    assert told(run) == ([f"page: missing; {anew}"], [])


def test_other_numbers_of_attempts_and_costs_are_faults_and_other_words_are_not(run: Run):
    """Other code than today's may have told them in other words, but not other numbers."""
    written = store.read(writing.address(run))
    change(run, "What it cost", "Its costs")
    said = "other words than this version's in cost; no part about artifacts differs"
    assert told(run) == ([], [f"runs/hand/report/index.html: {said}"])
    store.write(writing.address(run), written)
    change(run, "<tr><td>all</td><td>", "<tr><td>all</td><td>9")
    assert len(told(run)[0]) == 1


def test_a_page_of_a_moved_store_is_the_same(run: Run, tmp_path: Path):
    (tmp_path / "store").rename(tmp_path / "moved")
    found = audit(str(tmp_path / "moved"), "hand")
    assert [one for one in found.faults if one.file.endswith("index.html")] == []
    assert found.unchecked == []


def test_a_page_of_a_run_that_has_not_ended_is_said_not_to_be_compared(recipe, tmp_path: Path):
    run = planned(validated(recipe, tmp_path), tmp_path, run_id="hand", iterations=2)
    with pytest.raises(StageError):
        go(run, tmp_path, "iteration-0001/update+fragment", StageError.of("crash", "ended"))
    assert told(run) == ([], ["runs/hand/report/index.html: the run has not ended"])


def test_a_page_older_than_its_artifacts_is_said_not_to_be_compared(run: Run):
    finished = store.read(writing.address(run))
    change(run, '<span class="state finished">finished</span>', '<span class="state running">running</span>')
    assert told(run) == ([], ["runs/hand/report/index.html: written before the run had ended; it was running"])
    store.write(writing.address(run), finished)
    store.write(store.join(run.slots.iteration(1, "update"), "logs", "29990131T120000-aaaa.log"), b"x")
    assert told(run) == ([], ["runs/hand/report/index.html: written before the newest attempt ended"])


def test_a_file_next_to_logs_that_is_none_hides_no_change_of_the_page(run: Run):
    store.write(store.join(run.slots.iteration(1, "update"), "logs", ".DS_Store"), b"x")
    assert told(run) == ([], [])
    change(run, "<title>", "<title>another ")
    assert len(told(run)[0]) == 1


def test_a_page_of_artifacts_to_be_made_again_is_said_not_to_be_compared(run: Run):
    invalidate(run.slots.iteration(1, "reward-ocr"), 1, "scored by mistake")
    assert told(run)[0] == []
    assert len(told(run)[1]) == 1


def test_a_page_by_another_version_of_the_program_is_said_not_to_be_compared(run: Run):
    written = store.read(writing.address(run)).decode()
    row = re.search(r"<dt>cosmos-rl-flows</dt><dd>([^<]*)</dd>", written)
    assert row is not None
    change(run, row[0], row[0].replace(row[1], "0.0.1"))
    change(run, "Did it learn?", "Has it learned?")
    said = f"version 0.0.1 of cosmos-rl-flows wrote it, this is version {row[1]}"
    assert told(run) == ([], [f"runs/hand/report/index.html: {said}"])


def test_a_page_while_a_process_works_on_the_run_is_said_not_to_be_compared(run: Run):
    change(run, "2 iterations trained", "3 iterations trained")
    with run.lease():
        assert told(run) == ([], ["runs/hand/report/index.html: a process works on the run"])
    assert len(told(run)[0]) == 1


def test_settings_that_decide_no_result_may_come_from_another_command(run: Run):
    _, made = current_of(run.slots.report)
    assert made is not None
    change(run, "<dt>train.num_iterations</dt>", "<dt>logging.logger</dt><dd>[]</dd>\n<dt>train.num_iterations</dt>")
    assert told(run) == ([], [])
    change(run, "<dt>train.optm_lr</dt><dd>0.001", "<dt>train.optm_lr</dt><dd>0.002")
    assert len(told(run)[0]) == 1


def test_damage_of_artifacts_on_the_page_is_reported_at_the_artifacts(run: Run):
    _, made = current_of(run.slots.iteration(1, "update"))
    assert made is not None
    store.write(store.join(made.slot, made.files[METRICS].path), b"no table")
    faults, (reason,) = told(run)
    assert (faults, "what it shows cannot be read: " in reason) == ([], True)
