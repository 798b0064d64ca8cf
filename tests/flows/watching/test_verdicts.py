"""What a terminal says of warnings and of reward hacking: first what matters, and the same as the report."""

import html
import re
from pathlib import Path

import pytest

from cosmos_rl_core.errors import ApprovalError
from flows.library import open_run
from flows.library.overview import Overview
from flows.planning.plan import Settings
from flows.planning.steps import read_run
from flows.reporting import writing
from flows.session import loop as session
from flows.terminal import commands
from flows.watching.screen import screen
from flows.watching.status_table import rendered
from stages.artifacts.generations import invalidate
from tests.flows.by_hand import validated
from tests.flows.imagined import Imagined
from tests.flows.reporting.test_writing import page_of
from tests.flows.warning.test_warnings import FOUR_PROMPTS, LIMITS, Loop
from tests.hand_made import planned

TRIPPED = "iteration 1: ocr rose from 0.3125 to 4.312 (z-score +14.52), by 19"


def told(overview: Overview, width: int, height: int) -> str:
    """What a terminal shows, with words that are not broken."""
    lines = screen(overview, width, height)
    assert len(lines) <= height
    return re.sub(r"\s+", " ", " ".join(lines))


@pytest.mark.parametrize(("width", "height"), [(130, 50), (80, 24), (80, 10), (60, 10)])
@pytest.mark.parametrize("on_trip", ["mark", "suspend"])
def test_a_warning_is_shown_on_terminals_of_any_size(recipe, tmp_path: Path, on_trip: str, width: int, height: int):
    loop = Loop(recipe(("statistics = false\n", LIMITS.replace("ON_TRIP", on_trip))), tmp_path)
    if on_trip == "suspend":
        with pytest.raises(ApprovalError):
            loop.run()
    else:
        loop.run()
        # There is much else to tell.
        for k in (0, 1):
            invalidate(f"{loop.store}/runs/hand/iterations/000{k}/fragment", 1, "asked for")
    commands.keep(read_run(loop.store, "hand"), Settings(loop.path, loop.store, "hand"))
    assert f"warning {TRIPPED}" in told(open_run("hand", loop.store).now(), width, height)


def test_of_several_limits_that_tripped_the_newest_is_shown_and_the_others_are_counted(recipe, tmp_path: Path):
    loop = Loop(recipe(("statistics = false\n", LIMITS.replace("ON_TRIP", "mark"))), tmp_path)
    loop.scores |= {2: loop.scores[1]}
    loop.stop_before = "policy-0003/export"
    with pytest.raises(KeyboardInterrupt):
        loop.run("train.num_iterations=3")
    assert re.search(r"warning iteration 2: ocr rose .* \(and 1 more in 2 iterations\)", told(
        open_run("hand", loop.store).now(), 80, 24))  # fmt: skip


@pytest.mark.parametrize(("drift", "word"), [(0.0, "no sign of it"), (-0.2, "perhaps")])
def test_a_finished_run_has_the_verdict_of_its_report_and_the_command_that_trains_on(
    recipe, tmp_path: Path, drift: float, word: str
):
    path = validated(recipe, tmp_path, ("statistics = false\n", "statistics = true\n"))
    run = planned(path, tmp_path, run_id="hand", iterations=4, overrides=FOUR_PROMPTS)
    with writing.Pages(run, print) as pages:
        imagined = Imagined(run, tmp_path, drift=drift)
        imagined.done = pages.done
        session.make(run, imagined.launch)
    commands.keep(run, Settings("package:tiny/nft", run.store_url, "hand", 4, ("train.seed=1",)))
    page = page_of(run)
    (signs,) = re.findall(r'<ul class="signs">(.*?)</ul>', page, re.DOTALL)
    bad = [html.unescape(words) for words in re.findall(r'<li class="bad">(.*?)</li>', signs)]
    assert ("Perhaps: there are signs of it" in page) == bool(bad) == (word == "perhaps")
    said = " ".join(bad) if bad else "no limit of early warning tripped."
    overview = open_run("hand", run.store_url).now()
    assert overview.hacking == f"{word}: {said}"
    assert f" hacking {word}: {said[:100]}" in told(overview, 130, 24)
    more = f"cosmos-flows run package:tiny/nft --store {run.store_url} --run-id hand --set train.seed=1 --iterations 8"
    assert f" train on to 8 iterations, with this command: {more}" in told(overview, 300, 24)
    lines = [str(part) for part in rendered(overview)]
    assert lines[-1] == f"to train on, to 8 iterations: {more}"
    assert f"reward hacking: {word}: {said}" in lines


def test_a_run_that_no_process_works_on_says_how_it_goes_on_also_in_a_pipe(recipe, tmp_path: Path):
    run = planned(recipe(), tmp_path, run_id="hand")
    lines = [str(part) for part in rendered(open_run("hand", run.store_url).now())]
    assert lines[-1] == "to go on, give its command again or retry its flow run"
    commands.keep(run, Settings("package:tiny/nft", run.store_url, "hand"))
    lines = [str(part) for part in rendered(open_run("hand", run.store_url).now())]
    assert lines[-1] == f"to go on: {commands.kept(run)}"
    with run.lease():
        assert "to go on" not in str([*rendered(open_run("hand", run.store_url).now())][-1])
