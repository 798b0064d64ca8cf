"""A run that is at work, failed, was stopped or killed, as ``status`` shows it."""

import io
import os
import re
import subprocess
import sys
import threading
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cosmos_rl_core.errors import StageError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import seal
from flows.cli import app as cli
from flows.ledger.ledger import Ledger
from flows.ledger.pages import Entry
from flows.library import open_run, states
from flows.library.lines import all_runs
from flows.planning.run import Run
from flows.running.progress import Progress, Reporter, read_progress
from flows.watching import status_table
from flows.watching.screen import screen
from stages.artifacts.generations import invalidate
from stages.artifacts.records import place_of
from stages.execution.outcome import Status
from tests.flows.by_hand import make_all, make_one, planned_run, whole_run
from tests.hand_made import make_iteration, make_run, planned, rewards

AT = Status(sequence=1, phase="denoise", step=3, total=12)


def words(run: Run) -> dict[str, str]:
    return {
        state.step.name: state.word for state in open_run("hand", run.store_url).now().states if state.word != "missing"
    }


def end_with(run: Run, wave: str, error: BaseException) -> None:
    """A process that ends in a wave."""

    def work() -> None:
        with Reporter(run.url) as reporter:
            reporter.working(wave, [])
            raise error

    with pytest.raises(type(error)):
        work()


def begun(recipe, tmp_path) -> Run:
    """A run whose policy and embeddings are current; iterations are to come."""
    return make_run(recipe(), tmp_path, iterations=0)


def test_the_wave_at_work_is_running_and_its_tries_count(recipe, tmp_path):
    run = begun(recipe, tmp_path)
    store.write(store.join(run.slots.iteration(0, "rollout"), "logs", "20250131T115900-aaaa.log"), b"killed")
    # The second has written a file already.
    store.write(store.join(run.slots.iteration(0, "rollout"), "attempts", "second", "00000.tar"), b"samples")
    with run.lease(), Reporter(run.url) as reporter:
        reporter.working("iteration-0000/rollout", [AT])
        found = open_run("hand", run.store_url).now()
        assert (found.life, found.holder and found.holder["pid"]) == ("running", os.getpid())
        (running,) = [state for state in found.states if state.word == "running"]
        assert (running.step.name, running.attempts) == ("iteration-0000/rollout", 2)
        first = next(iter(status_table.rendered(found)))
        assert f"running as process {os.getpid()} on " in str(first)
        assert "iteration-0000/rollout denoise 3/12" in str(first)
    assert "running" not in words(run).values()
    # Its process ended well, and yet there is much left of the run.
    assert open_run("hand", run.store_url).now().life == "idle"


def test_attempts_at_a_wave_that_began_meanwhile_are_not_lost(recipe, tmp_path):
    run = planned_run(recipe, tmp_path)
    at_work = Entry(stage="policy", slot=place_of(run.slots.policy(0)), devices=1)
    with run.lease(), Reporter(run.url) as reporter:
        found = open_run("hand", run.store_url).now()
        # Before the first wave and its page of the ledger there is nothing to tell.
        assert (found.life, found.progress.wave, open_run("hand", run.store_url).now().lost) == ("running", "", None)
        reporter.working("policy", [])
        Ledger(run.url, "", [].append).page("policy", time.monotonic()).turn(lambda: [at_work])
        assert found.lost == 0
    assert open_run("hand", run.store_url).now().lost == 1


def test_a_failed_stage_says_why_in_a_line(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    for name in ("reward-ocr", "reward-jpeg"):
        invalidate(run.slots.iteration(1, name), 1, "asked for")
    why = "iteration-0001/reward-ocr failed (unavailable): no judge answers"
    end_with(run, "iteration-0001/reward-jpeg+reward-ocr", StageError(f"{why}\nand much more"))
    found = open_run("hand", run.store_url).now()
    assert (found.life, found.progress.error) == ("failed", f"{why}\nand much more")
    assert words(run)["iteration-0001/reward-ocr"] == "failed"
    assert words(run)["iteration-0001/reward-jpeg"] == "invalidated"
    assert why in list(status_table.rendered(found))
    # What was made since does not fail any more, whatever was said of it.
    make_one(rewards(run, run.slots.iteration(1, "rollout"), 1)[1])
    assert words(run)["iteration-0001/reward-ocr"] == "stands"


def test_a_continued_run_shows_the_iterations_of_its_command_also_after_its_end(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)

    def work() -> None:
        with run.lease(), Reporter(run.url, lambda: False, 4) as reporter:
            reporter.working("iteration-0002/rollout", [])
            assert position() == "iteration-0002 (3 of 4): rollout, 0 s"
            raise KeyboardInterrupt

    def position() -> str:
        (line,) = [line for line in screen(open_run("hand", run.store_url).now(), 80, 24) if line.startswith("now ")]
        return line[9:]

    with pytest.raises(KeyboardInterrupt):
        work()
    assert position().startswith("iteration-0002 (3 of 4): 22 of 38 ")
    # Of a process that made one stage it is not said anew.
    with run.lease(), Reporter(run.url, lambda: False, 2):
        pass
    assert position().startswith("iteration-0002 (3 of 4): 22 of 38 ")
    assert open_run("hand", run.store_url).collected().run.recipe.train.num_iterations == 4


def test_a_run_that_ended_without_an_error_of_its_own_was_stopped(recipe, tmp_path):
    run = begun(recipe, tmp_path)
    end_with(run, "iteration-0000/rollout", KeyboardInterrupt())
    assert open_run("hand", run.store_url).now().life == "stopped"
    assert words(run)["iteration-0000/rollout"] == "interrupted"


def test_a_killed_process_leaves_an_interrupted_run(recipe, tmp_path):
    run = begun(recipe, tmp_path)
    work = (
        "import os, sys\nfrom cosmos_rl_core.storage.lease import Lease\nfrom flows.running.progress import Reporter\n"
        "Lease(sys.argv[1] + '/lease').__enter__()\nreporter = Reporter(sys.argv[1]).__enter__()\n"
        "reporter.working('iteration-0000/rollout', [])\nos.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", work, run.url], check=False).returncode == -9
    found = open_run("hand", run.store_url).now()
    assert (found.life, found.holder) == ("interrupted", None)
    assert words(run)["iteration-0000/rollout"] == "interrupted"


def test_another_look_reads_only_stages_that_the_process_has_passed(recipe, tmp_path, monkeypatch):
    run = begun(recipe, tmp_path)
    with run.lease(), Reporter(run.url) as reporter:
        reporter.working("iteration-0000/rollout", [])
        before = open_run("hand", run.store_url).now()
        make_iteration(run, 0)
        reporter.done()
        reporter.working("iteration-0001/rollout", [])
        looked: list[str] = []
        whole = states.state_of
        monkeypatch.setattr(states, "state_of", lambda step, *rest: (looked.append(step.name), whole(step, *rest))[1])
        after = before.again()
        assert looked == [f"iteration-0000/{stage}" for stage in ("rollout", "reward-ocr", "update", "fragment")] + [
            "iteration-0001/rollout"
        ]
        words_of_0 = [state.word for state in after.states if state.step.parent == "iteration-0000"]
        assert words_of_0 == [*["stands"] * 3, "missing"]
        assert {state.step.name for state in after.states if state.word == "running"} == {"iteration-0001/rollout"}
        looked.clear()
        assert after.again().current == after.current
        assert looked == []


def test_slots_of_distant_iterations_are_not_asked_for(recipe, tmp_path, monkeypatch):
    run = planned(recipe(), tmp_path, run_id="hand", iterations=50)
    looked: list[str] = []
    whole = states.state_of
    monkeypatch.setattr(states, "state_of", lambda step, *rest: (looked.append(step.name), whole(step, *rest))[1])
    assert len(open_run("hand", run.store_url).now().states) == 50 * 4 + 5
    assert not [name for name in looked if name.startswith("iteration-0002")]


def test_a_run_is_watched_to_its_end_and_printed_in_lines_without_a_terminal(recipe, tmp_path, monkeypatch):
    run = begun(recipe, tmp_path)
    monkeypatch.setattr(status_table, "LOOK_S", 0.02)
    ready, seen = threading.Event(), threading.Event()

    def work() -> None:
        with run.lease(), Reporter(run.url) as reporter:
            reporter.working("iteration-0000/rollout", [])
            ready.set()
            seen.wait(60)

    class Printed(io.StringIO):
        """Ends the work at the first line."""

        def write(self, text: str) -> int:
            seen.set()
            return super().write(text)

    worker = threading.Thread(target=work)
    worker.start()
    ready.wait()
    printed = Printed()
    found = status_table.watch(run.store_url, "hand", Console(file=printed, width=200))
    worker.join()
    assert found.life == "idle"
    first, *rest = printed.getvalue().splitlines()
    assert first == "iteration-0000/rollout is running"
    assert rest[-2] == "2 of 13 stages are finished"
    assert "\x1b" not in printed.getvalue()


def test_watching_a_run_at_rest_ends_at_once_and_its_exit_code_says_whether_it_is_whole(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    command = ["status", "hand", "--store", run.store_url]
    assert CliRunner().invoke(cli.app, [*command, "--watch"]).exit_code == 0
    invalidate(run.slots.iteration(1, "update"), 1, "asked for")
    ended = CliRunner().invoke(cli.app, [*command, "--watch"])
    assert ended.exit_code == 70
    assert re.search(r"hand is not complete: \d+ stages left to make\n$", ended.stderr)
    assert CliRunner().invoke(cli.app, command).exit_code == 0


def test_damaged_progress_counts_as_none(recipe, tmp_path):
    run = begun(recipe, tmp_path)
    assert read_progress(run.url) is None
    said = seal("progress", {"end": "done"})
    for damage in (b"", b"{}", said[:-1], said.replace(b"done", b"dome"), seal("progress", {"end": "dome"})):
        store.write(store.join(run.url, "progress.json"), damage)
        assert read_progress(run.url) is None
        assert open_run("hand", run.store_url).now().life == "idle"
    store.write(store.join(run.url, "progress.json"), said)
    assert read_progress(run.url) == Progress(end="done")


def test_a_stage_that_is_made_alone_leaves_the_run_as_it_was(recipe, tmp_path):
    """As `stage/run` does. Until nothing is left of the run, it is not done."""
    run = begun(recipe, tmp_path)

    def make_alone(k: int) -> None:
        with run.lease(), Reporter(run.url, lambda: run.is_made) as reporter:
            reporter.working(f"iteration-{k:04d}/rollout", [])
            make_iteration(run, k)

    make_alone(0)
    assert open_run("hand", run.store_url).now().life == "idle"
    end_with(run, "iteration-0001/rollout", KeyboardInterrupt())
    make_alone(1)
    assert open_run("hand", run.store_url).now().life == "stopped"
    (line,) = all_runs(run.store_url)
    assert (line.state, line.iterations) == ("stopped", 2)


def test_a_run_recorded_as_done_is_finished_only_if_its_last_wave_was_made(recipe, tmp_path):
    run = begun(recipe, tmp_path)
    store.write(store.join(run.url, "progress.json"), seal("progress", {"end": "done"}))
    assert open_run("hand", run.store_url).now().life == "idle"
    make_all(run)
    store.write(store.join(run.url, "progress.json"), seal("progress", {"end": "done"}))
    assert open_run("hand", run.store_url).now().life == "finished"
    assert [line.state for line in all_runs(run.store_url)] == ["finished"]
    # A longer run is not at its end where the shorter one was.
    assert not run.going_to(5).is_made
