"""The status of a run on terminals of any size: ten answers, none of them below the cut, and no name broken."""

import io
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import seal
from flows.devices.staying import Processes, Staying
from flows.library.opened_run import open_run
from flows.library.overview import Overview
from flows.planning.plan import Settings
from flows.planning.run import Run
from flows.running.progress import Reporter
from flows.session import loop
from flows.terminal import commands
from flows.terminal.console import VisibleConsole
from flows.watching import status_table
from flows.watching.screen import folded_command
from stages.artifacts.manifest import Manifest
from stages.artifacts.records import place_of
from stages.artifacts.request import Request
from stages.artifacts.slots import current_manifest
from stages.execution.outcome import Status
from stages.execution.spending import Crew
from tests.flows.by_hand import SECONDS, SFT, SMALL_SFT, files_of, make_all
from tests.flows.ledger.test_ledger import entry, written
from tests.flows.printed import ROOT
from tests.hand_made import make, planned

WAVE = "iteration-0004/update+fragment"
WHY = "iteration-0004/update ended (killed, exit code -9)"
SIZES = [(80, 24), (60, 15), (130, 50)]
NAMES = ("reward-pixel_statistics", "pixel_statistics")


def made(request: Request) -> Manifest:
    """What is not current yet, with a score that grows and its error."""
    name = request.slot.rpartition("/")[2].partition("-")[2]
    mean = 0.5 + 0.01 * (request.iteration or 0)
    scores: dict[str, Any] = {name: mean, "standard_error": 0.0123} if request.stage == "reward" else {}
    files = files_of(request, request.slot.encode())
    return current_manifest(request) or make(request, files, seconds=SECONDS[request.stage], **scores)


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Run]:
    """Eight iterations up to a wave; one attempt at it was lost."""
    monkeypatch.chdir(tmp_path)

    def begin(until: str) -> Run:
        run = planned(str(ROOT / "configs/tiny/ddrl.toml"), tmp_path, run_id="ddrl-tiny-be4e1a9f", iterations=8)
        ledger = written(run, SECONDS, until=until)
        slot = place_of(run.slots.iteration(4, "update"))
        lost = [entry("update", slot, 3.0, devices=1).model_copy(update={"outcome": "killed"})]
        page = ledger.page(WAVE, 0.0)
        page.turn(lambda: lost)
        page.close(lost)

        def launch(name: str, *requests: Request) -> list[Manifest]:
            if name == until:
                raise InterruptedError
            return [made(request) for request in requests]

        with suppress(InterruptedError):
            loop.make(run, launch)
        commands.keep(run, Settings("package:tiny/ddrl", run.store_url))
        store.write(store.join(run.slots.report, "index.html"), b"<html>")
        return run

    return begin


def ended(run: Run, **progress: str) -> Overview:
    store.write(store.join(run.url, "progress.json"), seal("progress", progress))
    return open_run(run.plan.run_id, run.store_url).now()


def shown(overview: Overview, width: int, height: int) -> list[str]:
    """The lines that a terminal of this size gets."""
    file = io.StringIO()
    terminal = VisibleConsole(file=file, force_terminal=True, width=width, height=height, highlight=False, markup=False)
    status_table.show(overview, terminal)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue()).splitlines()
    assert len(lines) < height
    assert max(map(cell_len, lines)) <= width
    return lines


def answer(lines: list[str], label: str) -> str:
    """The text of a row."""
    start = next(i for i, line in enumerate(lines) if line.startswith(f"{label} "))
    end = next((i for i, line in enumerate(lines[start + 1 :], start + 1) if not line.startswith(" ")), len(lines))
    return " ".join(line[9:] for line in lines[start:end])


def require_common(lines: list[str]) -> None:
    """What is asked of every run: the reward with its errors, the best policy, the cost, lost attempts, the report."""
    assert re.search(r"0\.5\d0 ± 0\.012 \(\w+ \d\) -> 0\.5\d0 ± 0\.012 \(\w+ \d\)$", answer(lines, "reward"))
    assert re.search(r"policy \d, held-out ocr 0\.\d", answer(lines, "best"))
    assert re.search(r"\d min of device time spent, 1 attempt lost$", answer(lines, "left"))
    assert answer(lines, "report") == "store/runs/ddrl-tiny-be4e1a9f/report/index.html"
    text = "\n".join(lines)
    assert all(found in NAMES for found in re.findall(r"[\w-]*pixel[\w-]*", text))


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_run_at_work_says_where_it_is_and_how_long_it_still_takes(begun, width, height):
    run = begun(WAVE)
    crew = Crew(workers=2, largest=3, units=3, of=12, lost=1)
    at = Status(sequence=1, phase="train", step=3, total=12, crew=crew)
    with run.lease(), Reporter(run.url) as reporter:
        stays = {"device": "GPU-1", "pid": 7, "since": "2026-01-02 03:04:05", "served": 12, "kept_bytes": 2**29}
        reporter.processes = lambda: Processes(stay=(Staying(**stays),), ended=("GPU-0: idle for 600 s",))
        reporter.working(WAVE, [at])
        overview = open_run(run.plan.run_id, run.store_url).now()
        lines = shown(overview, width, height)
    assert overview.as_json()["processes"] == {"stay": [stays], "ended": ["GPU-0: idle for 600 s"]}
    assert overview.as_json()["workers"] == crew.model_dump()
    if height > 24:
        assert answer(lines, "workers") == "2 now, 3 at most, 3 of 12 units made, 1 lost"
    assert lines[0].startswith("run      ddrl-tiny-be4e1a9f: running as process ")
    assert answer(lines, "now").startswith("iteration-0004 (5 of 8): update+fragment, train 3/12, ")
    assert re.match(r"about [\d.]+ min of work, ", answer(lines, "left"))
    assert "update running" in answer(lines, "stages")
    if height > 24:
        since = "since 2026-01-02 03:04:05 UTC, 12 stages served, keeps 0.50 GiB"
        assert answer(lines, "stays") == f"process 7 on GPU-1 {since}"
        assert answer(lines, "ended") == "GPU-0: idle for 600 s"
    require_common(lines)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_failed_run_says_why_and_with_which_command_it_goes_on(begun, width, height):
    run = begun(WAVE)
    lines = shown(ended(run, end="failed", error=f"{WHY}\nmore", wave=WAVE), width, height)
    assert lines[0] == "run      ddrl-tiny-be4e1a9f: failed"
    assert answer(lines, "now") == "iteration-0004 (5 of 8): update ended (killed, exit code -9)"
    text = "\n".join(lines).replace("\\\n", "")
    (command,) = re.findall("^cosmos-flows run .*$", text, re.MULTILINE)
    assert shlex.split(command) == shlex.split(commands.kept(run))
    require_common(lines)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_finished_run_says_so_and_shows_its_results(begun, width, height):
    lines = shown(ended(begun(""), end="done"), width, height)
    assert lines[0] == "run      ddrl-tiny-be4e1a9f: finished"
    assert answer(lines, "now") == "all 60 stages are finished, 8 of 8 iterations"
    assert answer(lines, "left").startswith("nothing, ")
    require_common(lines)


def test_older_iterations_are_a_line_each_and_one_for_all_where_they_do_not_fit(begun):
    overview = ended(begun(""), end="done")
    older = [line for line in shown(overview, 80, 24) if line.startswith("iteration-")]
    assert [line.partition(":")[0] for line in older] == [f"iteration-{k:04d}" for k in range(7, -1, -1)]
    assert older[0] == "iteration-0007: 46.5 s, ocr 0.570, pixel_statistics 0.570"
    rest, more = shown(overview, 60, 21)[-2:]
    # The rows above name a folder of this test, whose length decides how many lines they need.
    found = re.fullmatch(r"start to iteration-000([3-6]): (\d+) of (\d+) stages are finished", rest)
    assert found is not None, rest
    assert int(found[2]) == int(found[3]) == 13 + 6 * int(found[1])
    assert more == "(| cat shows all of it as a table)"


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_run_that_is_watched_is_drawn_over_in_the_size_of_the_terminal(begun, monkeypatch, width, height):
    run = begun(WAVE)
    monkeypatch.setattr(status_table, "LOOK_S", 0.02)
    ready, seen = threading.Event(), threading.Event()

    def work() -> None:
        with run.lease(), Reporter(run.url) as reporter:
            reporter.working(WAVE, [])
            ready.set()
            seen.wait(60)

    class Terminal(io.StringIO):
        """Ends the work when something is shown."""

        def write(self, text: str) -> int:
            if "iteration-0004" in text:
                seen.set()
            return super().write(text)

    worker = threading.Thread(target=work)
    worker.start()
    ready.wait()
    size = {"width": width, "height": height}
    file = Terminal()
    terminal = VisibleConsole(file=file, force_terminal=True, highlight=False, markup=False, _environ={}, **size)
    assert status_table.watch(run.store_url, run.plan.run_id, terminal).life == "idle"
    worker.join()
    frames = re.split(r"(?:\x1b\[\d*A|\x1b\[2K|\r)+", file.getvalue())
    drawn = [re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", frame).splitlines() for frame in frames]
    (first, *_) = [
        lines for lines in drawn if any("iteration-0004 (5 of 8): update+fragment" in line for line in lines)
    ]
    assert len(first) < height
    assert max(map(cell_len, (line.rstrip() for line in first))) <= width


def test_the_last_picture_stays_after_ctrl_c_and_says_how_old_it_is(begun, monkeypatch):
    run = begun(WAVE)
    file = io.StringIO()
    terminal = VisibleConsole(file=file, force_terminal=True, width=80, height=24, highlight=False, _environ={})

    def ctrl_c(_: float) -> None:
        raise KeyboardInterrupt

    with run.lease(), Reporter(run.url) as reporter:
        reporter.working(WAVE, [])
        monkeypatch.setattr(time, "sleep", ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            status_table.watch(run.store_url, run.plan.run_id, terminal)
        overview = open_run(run.plan.run_id, run.store_url).now()
    picture = file.getvalue().rpartition("run      ddrl-tiny-be4e1a9f: running")[2]
    assert "update+fragment" in picture
    # Nothing goes up again and erases it.
    assert "\x1b[2K" not in picture
    told = r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC, \d+\.\d s ago"
    assert re.search(rf"^as of    {told}", picture, re.MULTILINE)
    assert re.fullmatch(f"as of {told}", [str(part) for part in status_table.rendered(overview)][-1])


def test_a_pipe_gets_every_stage_in_lines_as_long_as_they_need_to_be(begun):
    overview = ended(begun(WAVE), end="failed", error=WHY, wave=WAVE)
    file = io.StringIO()
    status_table.show(overview, VisibleConsole(file=file, width=1_000_000, highlight=False, markup=False))
    lines = file.getvalue().splitlines()
    assert [sum(f"iteration-{k:04d} " in line for line in lines) for k in range(8)] == [1] * 8
    assert "┃ reward-pixel_statistics " in file.getvalue()


def test_a_run_without_a_ledger_says_what_is_not_known(tmp_path):
    run = planned(SFT, tmp_path, run_id="sft", overrides=SMALL_SFT)
    make_all(run)
    lines = shown(open_run("sft", run.store_url).now(), 60, 15)
    assert lines[0] == "run      sft: no process works on it"
    assert answer(lines, "reward") == "held-out ocr: 0.250 (policy 0) -> 0.250 (policy 2)"
    assert answer(lines, "left") == "nothing, cost is not recorded, attempts are not recorded"
    assert answer(lines, "report") == "written after the first iteration"


def test_a_stage_that_is_to_be_made_again_is_shown_with_its_reason(begun):
    run = begun("")
    store.remove(store.join(run.slots.policy(8), "manifest.1.json"))
    lines = shown(open_run(run.plan.run_id, run.store_url).now(), 80, 24)
    assert answer(lines, "now").startswith("iteration-0007 (8 of 8): ")
    assert "update -" in answer(lines, "stages")


def test_a_folded_command_is_one_word_for_word_to_a_shell():
    command = "cosmos-flows run " + "x" * 90 + " --store '/a b/c d' --set 'rewards=[{ a = 1 }]' --run-id hand"
    for width in (30, 60, 80):
        lines = folded_command(command, width)
        assert max(map(len, lines)) <= width
        script = "printf '%s\\n' " + "\n".join(lines)
        said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
        assert said.splitlines() == shlex.split(command)
