"""What the report says of attempts without an artifact and of how the run ended: the causes that were recorded."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prefect.exceptions import Pause, TerminationSignal

from cosmos_rl_core.errors import ApprovalError, BudgetError, StageError, StoppedError
from cosmos_rl_core.storage import store
from flows.ledger import pages
from flows.ledger.ledger import Ledger
from flows.ledger.pages import Entry
from flows.library import open_run
from flows.planning.run import Run
from flows.reporting.report import write_report
from flows.running.progress import Reporter
from flows.watching.screen import screen
from flows.watching.status_table import rendered
from stages.artifacts.records import place_of
from tests.flows.by_hand import validated
from tests.flows.ledger.test_ledger import SPENT
from tests.flows.reporting.test_writing import LOG, go, page_of
from tests.hand_made import planned

WAVE = "iteration-0001/update+fragment"
NONE = "No attempt at a stage ended without an artifact."
KILLED = "killed from outside of its run: by SIGKILL, SIGTERM or a scheduler"
CUT_OFF = "its flow ended before it could say why, as by kill -9 or with its machine"


@pytest.fixture
def run(recipe, tmp_path: Path) -> Run:
    """Two iterations, stopped before the update of the second one, with the ledger of a first stage."""
    run = planned(validated(recipe, tmp_path), tmp_path, run_id="hand", iterations=2)
    with pytest.raises(KeyboardInterrupt):
        go(run, tmp_path, WAVE, KeyboardInterrupt())
    record(run, "policy", attempt(run.slots.policy(0), "made"))
    return run


def attempt(slot: str, outcome: str, why: str = "") -> Entry:
    """An attempt of a second on a device."""
    stage = slot.rpartition("/")[2]
    return Entry(stage=stage, slot=place_of(slot), devices=1, seconds=1.0, outcome=outcome, why=why, spent=SPENT)


def record(run: Run, wave: str, *entries: Entry) -> None:
    """Add a page to the ledger; it stays open."""
    Ledger(run.url, "", [].append).page(wave, time.monotonic()).turn(lambda: entries)


def on_demand(run: Run) -> str:
    return store.read(write_report(open_run("hand", run.store_url))).decode()


def rows(page: str) -> list[tuple[str, ...]]:
    """Attempts without an artifact: stage, how many there were, why."""
    failed = page[page.index('<section id="failed"') :].partition("</section>")[0]
    return re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", failed)


def fact(page: str, name: str) -> str:
    (found,) = re.findall(rf"<dt>{name}</dt><dd>(.*?)</dd>", page)
    return found


def left_in_all(page: str) -> str:
    """Attempts without an artifact in the last row of the cost table."""
    cost = page[page.index('<section id="cost"') :].partition("</table>")[0]
    return re.findall(r"<td>(.*?)</td>", cost)[-1]


@pytest.mark.parametrize(
    ("outcome", "why", "cause"),
    [
        ("stopped", "Pause", "suspended in Prefect"),
        ("stopped", "KeyboardInterrupt", "stopped by Ctrl-C"),
        ("stopped", "TerminationSignal", "ended by SIGTERM, as by a cancellation in Prefect"),
        ("stopped", "stopped by ann@host; the same command continues it", "stopped with cosmos-flows stop by ann@host"),
        ("stopped", "another process works on it\nand more", "ended with its run: another process works on it"),
        ("stopped", "", "stopped with its run; what stopped the run is not recorded"),
        ("open", "", CUT_OFF),
        ("killed", "", f"{KILLED}; its log ends: out_of_memory: 80 GB"),
        ("crash", "", "crashed; its log ends: out_of_memory: 80 GB"),
        ("hung", "", "reported no progress or exceeded its time limit"),
    ],
)
def test_an_attempt_without_an_artifact_has_its_recorded_cause(run: Run, outcome: str, why: str, cause: str):
    update = run.slots.iteration(1, "update")
    if outcome != "open":  # a killed flow keeps no log
        store.write(store.join(update, "logs", "20250131T120000-aaaa.log"), LOG)
    record(run, WAVE, attempt(update, outcome, why))
    page = on_demand(run)
    assert rows(page) == [("iteration-0001/update", "1", cause)]
    assert fact(page, "attempts") == "2, of which 1 left no artifact"
    assert left_in_all(page) == "1"
    assert NONE not in page


def test_causes_of_one_stage_are_told_apart_also_if_it_is_current(run: Run):
    update, rollout = run.slots.iteration(1, "update"), run.slots.iteration(0, "rollout")
    record(run, "iteration-0000/rollout", attempt(rollout, "open"))
    record(run, "iteration-0000/rollout", attempt(rollout, "made"))
    for outcome, why in (("killed", ""), ("killed", ""), ("stopped", "Pause"), ("killed", "")):
        record(run, WAVE, attempt(update, outcome, why))
    for second in "012":
        store.write(store.join(update, "logs", f"20250131T12000{second}-aaaa.log"), LOG)
    store.write(store.join(update, "logs", "20250131T120003-aaaa.log"), b"\n")
    page = on_demand(run)
    assert rows(page) == [
        ("iteration-0000/rollout", "1", CUT_OFF),
        ("iteration-0001/update", "2", KILLED),
        ("iteration-0001/update", "1", "suspended in Prefect"),
        ("iteration-0001/update", "1", f"{KILLED}; its log says nothing"),
    ]
    assert fact(page, "attempts") == "7, of which 5 left no artifact"
    assert left_in_all(page) == "5"


def test_the_report_says_so_if_every_attempt_left_an_artifact(run: Run):
    page = on_demand(run)
    assert NONE in page
    assert fact(page, "attempts") == "1, of which 0 left no artifact"
    assert left_in_all(page) == "0"


def test_an_attempt_at_work_is_no_failure(run: Run):
    record(run, WAVE, attempt(run.slots.iteration(1, "update"), "open"))
    with run.lease(), Reporter(run.url) as reporter:
        reporter.working(WAVE, [])
        page = on_demand(run)
        assert NONE in page
        assert fact(page, "attempts") == "2, of which 0 left no artifact and 1 is at work"
        assert left_in_all(page) == "0"
        reporter.done()
        reporter.working("policy", [])
        # Another wave: the flow that began this one was killed.
        assert rows(on_demand(run)) == [("iteration-0001/update", "1", CUT_OFF)]


def test_a_wave_that_began_while_the_report_was_made_is_at_work(run: Run, monkeypatch: pytest.MonkeyPatch):
    record(run, WAVE, attempt(run.slots.iteration(1, "update"), "open"))
    with run.lease(), Reporter(run.url) as reporter:
        reporter.working("iteration-0001/reward-ocr", [])
        # The page of the ledger is written before the progress of its wave.
        monkeypatch.setattr(time, "sleep", lambda _: reporter.working(WAVE, []))
        page = on_demand(run)
    assert NONE in page
    assert fact(page, "attempts") == "2, of which 0 left no artifact and 1 is at work"


def test_logs_from_before_the_ledger_count_too(run: Run):
    update = run.slots.iteration(1, "update")
    for second in "01":
        store.write(store.join(update, "logs", f"20250131T12000{second}-aaaa.log"), LOG)
    record(run, WAVE, attempt(update, "stopped", "Pause"))
    page = on_demand(run)
    assert rows(page) == [
        ("iteration-0001/update", "1", "suspended in Prefect"),
        ("iteration-0001/update", "1", "not in the ledger; its log ends: out_of_memory: 80 GB"),
    ]
    assert fact(page, "attempts") == "2, of which 1 left no artifact; 1 more is not in the ledger"
    assert left_in_all(page) == "2"


def test_a_log_without_words_and_without_a_ledger_has_no_known_cause(run: Run):
    store.remove(pages.url_of(run.url, 0))
    store.write(store.join(run.slots.iteration(1, "update"), "logs", "20250131T120000-aaaa.log"), b"")
    assert rows(on_demand(run)) == [("iteration-0001/update", "1", "not known: its log says nothing")]


def test_a_damaged_ledger_is_reported_and_hides_nothing_else(run: Run):
    store.write(pages.url_of(run.url, 0), b"{}")
    store.write(store.join(run.slots.iteration(1, "update"), "logs", "20250131T120000-aaaa.log"), LOG)
    page = on_demand(run)
    assert "00000.json" in fact(page, "ledger")
    assert rows(page) == [("iteration-0001/update", "1", "out_of_memory: 80 GB")]


def test_device_hours_show_start_up_separately(run: Run):
    page = on_demand(run)
    # 0.875 of one second.
    assert fact(page, "device time") == "1 s, of which start-up 0.875 s"
    page_of_killed = Entry(stage="update", slot=place_of(run.slots.iteration(1, "update")), devices=1, outcome="killed")
    record(run, WAVE, page_of_killed)
    assert fact(on_demand(run), "device time").endswith("; unknown for 1 attempt")


@pytest.mark.parametrize(
    ("error", "state", "ending", "told"),
    [
        (KeyboardInterrupt(), "stopped", "Stopped by Ctrl-C; the same command continues it", ""),
        (Pause(), "suspended", "Suspended in Prefect; Resume or the same command continues it", ""),
        (
            TerminationSignal(signal=15),
            "stopped",
            "Ended by SIGTERM, as by a cancellation in Prefect; the same command continues it",
            "",
        ),
        (
            StoppedError("stopped by ann@host; the same command continues it"),
            "stopped",
            "Stopped with cosmos-flows stop by ann@host; the same command continues it",
            "",
        ),
        (
            ApprovalError.on("evidence", "iteration 1 exceeds its limits"),
            "suspended",
            "Suspended by early warning until somebody approves it",
            "iteration 1 exceeds its limits",
        ),
        (
            BudgetError("iteration 1 would exceed the limit"),
            "limited",
            "Reached train.max_gpu_hours; the same command with a higher limit continues it",
            "iteration 1 would exceed the limit",
        ),
        (StageError.of("crash", "iteration-0001/update ended"), "failed", "Failed", "iteration-0001/update ended"),
    ],
)
def test_a_run_and_a_page_on_demand_say_alike_how_the_run_ended(
    recipe, tmp_path: Path, error: BaseException, state: str, ending: str, told: str
):
    run = planned(validated(recipe, tmp_path), tmp_path, run_id="hand", iterations=2)
    with pytest.raises(type(error)), Reporter(run.url):
        go(run, tmp_path, WAVE, error)
    for page in (page_of(run), on_demand(run)):
        assert f'<span class="state {state}">{state}</span>' in page
        assert f"<p>{ending}: 1 of 2 iterations are trained.</p>" in page
        assert re.findall(r'<pre class="failed">(.*?)</pre>', page) == [told] * bool(told)


def test_the_report_of_a_killed_flow_says_what_is_not_known(run: Run):
    work = (
        "import os, sys\nfrom cosmos_rl_core.storage.lease import Lease\nfrom flows.running.progress import Reporter\n"
        "Lease(sys.argv[1] + '/lease').__enter__()\nReporter(sys.argv[1]).__enter__()\nos.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", work, run.url], check=False).returncode == -9
    words = "Its flow ended before it could say why, as by kill -9 or with its machine; the same command continues it"
    page = on_demand(run)
    assert '<span class="state interrupted">interrupted</span>' in page
    assert words in page
    now = open_run("hand", run.store_url).now()
    assert screen(now, 80, 24)[0] == "run      hand: was interrupted"
    assert str(next(rendered(now))).endswith("no process works on it; the last one was interrupted")
