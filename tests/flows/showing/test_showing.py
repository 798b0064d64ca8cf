"""The artifacts of a run in Prefect: their contents, and a board whose server fails."""

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pandas as pd
import psutil
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from cosmos_rl_core.errors import ArtifactError
from flows.library.collected import Collected
from flows.planning.run import Run
from flows.session import loop
from flows.showing import contents
from flows.showing.board import Board, Shown
from flows.showing.showing import Showing
from stages.artifacts.manifest import Manifest
from stages.execution.outcome import Status
from stages.reporting.book import Piece, Trained
from stages.reporting.excerpt import Excerpt, Picture, PromptScore, Score, Tripped
from tests.flows.by_hand import validated
from tests.flows.imagined import Imagined
from tests.hand_made import planned

NO_RUN = cast(Run, SimpleNamespace(url="/nowhere", plan=SimpleNamespace(baseline=0, first=0)))
ROLES = {"ocr": "train", "jpeg": "monitor"}


def score(reward: str, mean: float, error: float | None) -> Score:
    return Score(reward=reward, score=reward, n=4, mean=mean, deviation=1.0, error=error, clusters=4)


def collected(run: Run | None, count: int, **more: Any) -> Collected:
    """Rewards k and -k with errors 3 and none; a KL of k / 2 in the mean of two steps."""
    found = Collected(run or NO_RUN)
    steps = {k: pd.DataFrame({"kl": [0.0, float(k)], "loss": [1.0, 3.0]}) for k in range(count)}
    for k in range(count):
        found.iterations[k] = Piece(Excerpt(k=k, scores=(score("ocr", k, 3.0), score("jpeg", -k, None)), **more))
        found.trained[k] = Trained(cast(Manifest, None), steps[k])
    return found


def rows(found: Collected, seconds: dict[int, float]) -> list[dict[str, str]]:
    return json.loads(contents.table(found, ROLES, seconds))


def test_a_row_has_rewards_with_errors_monitors_kl_limits_and_seconds():
    tripped = (Tripped(words="ocr rose", reward="ocr", score="ocr", samples=()),)
    newest, before = rows(collected(None, 2, tripped=tripped), {1: 12.34})
    assert newest == {
        "iteration": "1",
        "ocr": "1 ± 3",
        "jpeg (monitor)": "-1",
        "kl": "0.5",
        "loss": "2",
        "tripped": "ocr rose",
        "seconds": "12.3",
    }
    assert (before["iteration"], before["seconds"]) == ("0", "0.0")


def test_iterations_that_share_a_row_say_how_many_limits_tripped():
    found = collected(None, 61)
    tripped = (Tripped(words="ocr rose", reward="ocr", score="ocr", samples=()),)
    for k in (0, 10, 11):
        found.iterations[k] = Piece(Excerpt(k=k, scores=(), tripped=tripped))
    oldest = rows(found, {})[:-3:-1]
    assert [(row["iteration"], row["tripped"]) for row in oldest] == [("0–9", "1 limit"), ("10", "ocr rose")]
    found.iterations[1] = found.iterations[0]
    assert rows(found, {})[-1]["tripped"] == "2 limits"


def test_only_numbers_that_the_algorithm_measures_have_a_column():
    found = collected(None, 2)
    measured = pd.DataFrame({"loss": [1.0, 3.0], "data_loss": [0.5, 1.0], "grad_norm": [math.nan, 2.0]})
    found.trained = {
        0: Trained(cast(Manifest, None), measured.assign(grad_norm=math.nan, data_loss=math.nan)),
        1: Trained(cast(Manifest, None), measured),
    }
    newest, before = rows(found, {})
    assert [*newest] == ["iteration", "ocr", "jpeg (monitor)", "loss", "data_loss", "grad_norm", "tripped", "seconds"]
    assert (newest["data_loss"], newest["grad_norm"]) == ("0.75", "2")
    assert (before["loss"], before["data_loss"], before["grad_norm"]) == ("2", "", "")


def on_prompts(found: Collected, names: Callable[[int], Sequence[str]]) -> Collected:
    """The same iterations on prompts by name, whose scores are k - 1 and k + 1."""
    for k, piece in found.iterations.items():
        listed = [
            PromptScore(prompt_id=name, prompt=name, mean=k + sign, n=2)
            for name, sign in zip(names(k), (-1, 1), strict=True)
        ]
        found.iterations[k] = Piece(piece.excerpt.model_copy(update={"by_prompt": tuple(listed), "prompts": 2}))
    return found


@pytest.mark.parametrize(
    ("names", "ocr", "other"),
    [
        # Each iteration has the error sqrt(2 / (2 - 1) * 2) / 2 = 1; 20 iterations on other prompts 1 / sqrt(20).
        (lambda k: (f"{k}a", f"{k}b"), "9.5 ± 0.22", "-9.5 ± 0.67"),
        # The same two prompts tell no more in 20 iterations than in one.
        (lambda _: "ab", "9.5 ± 1", "-9.5"),
    ],
)
def test_the_error_of_old_iterations_knows_which_prompts_they_have_in_common(names: Any, ocr: str, other: str):
    found = collected(None, 1000)
    for k, piece in found.iterations.items():
        scores = score("ocr", k, 1.0), score("jpeg", -k, 3.0)
        found.iterations[k] = Piece(piece.excerpt.model_copy(update={"scores": scores}))
    oldest = rows(on_prompts(found, names), {})[-1]
    assert (oldest["ocr"], oldest["jpeg (monitor)"]) == (ocr, other)


def test_without_the_prompts_of_old_iterations_their_mean_has_no_error():
    assert rows(collected(None, 1000), {})[-1]["ocr"] == "9.5"


def test_a_thousand_iterations_are_a_hundred_rows_of_which_old_ones_are_means():
    found = on_prompts(collected(None, 1000), lambda k: (f"{k}a", f"{k}b"))
    found = rows(found, dict.fromkeys(range(1000), 2.0))
    assert len(found) == 98
    assert len(json.dumps(found)) < 20_000
    assert [found[place]["iteration"] for place in (0, 49, 50)] == ["999", "950", "940–949"]
    oldest = found[-1]
    assert (oldest["iteration"], oldest["ocr"], oldest["kl"]) == ("0–19", "9.5 ± 0.22", "4.75")
    assert oldest["seconds"] == "2.0"


@pytest.mark.parametrize("count", [1, 50, 51, 149, 550, 551, 2000])
def test_every_iteration_is_in_one_row(count: int):
    spans = list(contents.spans(range(count)))
    assert [k for span in spans for k in span] == list(range(count))
    assert len(spans) <= contents.NEWEST + contents.BLOCKS + 1
    assert spans[-min(count, 50) :] == [[k] for k in range(max(0, count - 50), count)]


def test_pictures_stay_small_and_prompts_cannot_break_the_grid():
    def judged(size: int) -> Collected:
        found = Collected(NO_RUN)
        shown = {str(n): Picture(sample=str(n), prompt="a|<b>\n`c`", seed=n, score=0.5) for n in range(8)}
        shown = {name: one.model_copy(update={"thumb": "data:," + "x" * size}) for name, one in shown.items()}
        for k in range(20):
            found.judged[k] = Piece(Excerpt(k=k, pictures=shown, shown={"fixed": tuple(shown)}))
        return found

    small, large = (contents.pictures(judged(size)) for size in (10, 30_000))
    assert [line for line in small.splitlines() if line.startswith("**")][:2] == ["**policy 0**", "**policy 4**"]
    assert small.splitlines()[4] == "| " + " | ".join(["a b c **0.500**"] * 4) + " |"
    assert (small.count("data:,"), large.count("data:,")) == (20, 10)
    assert len(large) < contents.LARGEST
    assert contents.pictures(judged(1_000_000)) == ""
    assert contents.pictures(Collected(NO_RUN)) == ""


def test_the_report_is_a_link_wherever_it_is():
    for address in ("https://x/index.html", "s3://bucket/x/index.html"):
        assert contents.report_link(address) == f"[report]({address})"
    local = contents.report_link("/a b/index.html")
    assert local.startswith("[report](file:///a%20b/index.html)\n")
    # A browser may not follow it from the page of a server: the path is there to be pasted.
    assert "`/a b/index.html`" in local


def test_keys_have_only_characters_that_prefect_takes():
    assert contents.key_of("My_run.7", "progress") == "my-run-7-progress"


class Recorded(Board):
    """A board that sends nothing and keeps everything, for tests of what is shown."""

    def __init__(self) -> None:
        super().__init__(UUID(int=0), print)
        self.shown: dict[str, list[Shown]] = {}

    def put(self, key: str, shown: Shown) -> None:
        self.shown.setdefault(key, []).append(shown)


def test_a_run_shows_its_iterations_progress_pictures_and_report(recipe, tmp_path: Path):
    before = children()
    run = planned(validated(recipe, tmp_path), tmp_path, run_id="hand", iterations=2)
    board, found, imagined = Recorded(), Collected(run), Imagined(run, tmp_path)
    with Showing(run, found, board, print) as showing:

        def launch(name: str, *requests: Any) -> list[Manifest]:
            showing.working(name, [Status(sequence=1, phase="sampling", step=1, total=2)])
            made = imagined.launch(name, *requests)
            for request, manifest in zip(requests, made, strict=True):
                found.add(request.slot, manifest)
            showing.ended(name, made)
            return made

        loop.make(run, launch)
    assert board.shown.keys() == {f"hand-{what}" for what in ("report", "progress", "iterations", "pictures")}
    newest, earlier = json.loads(str(board.shown["hand-iterations"][-1].data))
    assert (newest["iteration"], earlier["iteration"]) == ("1", "0")
    assert float(newest["ocr"].split(" ± ")[0]) > float(earlier["ocr"].split(" ± ")[0])
    # A rollout, its reward, an update, and the fragment, which is real.
    assert float(newest["seconds"]) == pytest.approx(10.0 + 2.0 + 30.0, abs=9.0)
    assert "**policy 2**" in str(board.shown["hand-pictures"][-1].data)
    begun, *_, ended = board.shown["hand-progress"]
    assert (ended.data, ended.description) == (100.0, "hand: finished")
    assert 0.0 < float(begun.data) < 10.0
    assert "sampling 1/2" in begun.description
    assert children() <= before, "a server was started, though nothing was sent"


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children()}


def test_a_failure_to_show_artifacts_ends_no_run(recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = planned(recipe(), tmp_path, run_id="hand", iterations=1)
    said: list[str] = []

    def damaged(*_: object) -> str:
        raise ArtifactError("it is damaged")

    monkeypatch.setattr(contents, "table", damaged)
    with Showing(run, Collected(run), Recorded(), said.append) as showing:
        showing.ended("report", [])
    assert said == ["the artifacts in Prefect are not up to date (ArtifactError: it is damaged)"]


def test_a_missing_server_is_noted_once_and_not_waited_for():
    said: list[str] = []
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1/api"}):
        began_s = time.monotonic()
        with Board(UUID(int=1), said.append) as board:
            for number in range(1000):
                board.put("x-progress", Shown("progress", number, "x"))
            assert time.monotonic() - began_s < 1.0
    assert time.monotonic() - began_s < 9.0
    assert len(said) == 1
    assert said[0].startswith("Prefect takes no artifacts now (")
