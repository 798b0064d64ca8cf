"""Two runs side by side. Samples and weights are imagined, with differences that are known; the comparison is real."""

import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import save

from cosmos_rl_core.errors import ConfigError, StageError
from flows.cli.app import app
from flows.comparing.comparison import compare
from flows.comparing.page import write_page
from flows.planning.run import Run
from flows.session import loop
from flows.watching.tracking import Tracker
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.formats.losses import by_item, summary_of
from stages.formats.samples import read_index
from stages.formats.tables import to_parquet
from stages.reporting.samples import Samples
from tests.flows.by_hand import HELD_OUT_MEDIA, validated
from tests.flows.imagined import Imagined
from tests.hand_made import NUMERICS, make, planned

UP, RIGHT = np.array([0.0, 1.0], "f4"), np.array([1.0, 0.0], "f4")


@dataclass
class Moves:
    """What a run learns."""

    step: np.ndarray
    """How far weights move in each iteration."""
    start: np.ndarray
    gain: float = 0.0
    """How much its held-out scores rise by training."""
    losses: dict[str, float] | None = None
    """The loss of each held-out item after training, without which there are no held-out media."""
    first_ranks: int = 3
    """Ranks that made policy 0; other stages have as many as hand-made ones."""
    rewards: tuple[float, ...] = ()
    """The reward of each prompt of a rollout, by the order of their ids; imagined ones if there are none."""


class Weighted(Imagined):
    """Imagined stages with real files of weights."""

    def __init__(self, run: Run, folder: Path, moves: Moves) -> None:
        super().__init__(run, folder)
        self.moves = moves

    def made(self, request: Request) -> Manifest:
        if request.stage == "policy":
            return make(request, self._weights(0), numerics=NUMERICS | {"world_size": self.moves.first_ranks})
        if request.stage == "export":
            return make(request, self._weights(request.iteration or 0))
        if request.stage == "validate":
            table = losses_of((self.moves.losses or {}) if request.iteration else {"a": 1.0})
            summary: dict[str, Any] = summary_of(by_item(table))
            return make(request, {contracts.Validate.LOSSES: to_parquet(table)}, **summary)
        return super().made(request)

    def _weights(self, version: int) -> dict[str, bytes]:
        moved = self.moves.start + version * self.moves.step
        return {"current/00000.safetensors": save({"moves": moved.astype("f4"), "stays": np.ones(3, "f4")})}

    def update(self, request: Request) -> dict[str, bytes]:
        files = super().update(request)
        return {name: data for name, data in files.items() if name != "current/w"} | self._weights(
            (request.iteration or 0) + 1
        )

    def scores(self, request: Request) -> dict[str, bytes]:
        files = super().scores(request)
        if "evaluate" in request.slot and request.iteration:
            samples = Samples.read(request.one("samples"), None)
            table = pd.DataFrame({"sample_id": samples.table.index, "prompt_id": samples.table["prompt_id"].to_numpy()})
            score = 0.5 + self.moves.gain + 0.01 * np.arange(len(table))
            table = table.assign(valid=True, score=score, scorer="imagined 1")
            files[contracts.Reward.SCORES] = to_parquet(table)
        elif self.moves.rewards and "evaluate" not in request.slot:
            index = read_index(Artifact(request.one("samples")))
            of_prompt = dict(zip(sorted(set(index["prompt_id"])), self.moves.rewards, strict=True))
            score = [of_prompt[one] for one in index["prompt_id"]]
            table = index[["sample_id", "prompt_id"]].assign(valid=True, score=score, scorer="imagined 1")
            answers = index[["sample_id"]].assign(error="", details="{}")
            files = {contracts.Reward.SCORES: to_parquet(table), contracts.Reward.ANSWERS: to_parquet(answers)}
        return files


def losses_of(items: dict[str, float]) -> pd.DataFrame:
    """The losses of items at two noise levels, of which the mean is given."""
    rows = [(item, item, t, loss + t - 0.5) for item, loss in items.items() for t in (0.25, 0.75)]
    return pd.DataFrame(rows, columns=["item_id", "medium", "t", "loss"])


Make = Callable[..., Run]


@pytest.fixture
def make_run(recipe: Any, tmp_path: Path) -> Make:
    """Makes runs of one store: two iterations, judged before and after."""

    def make_it(
        run_id: str, moves: Moves, overrides: tuple[str, ...] = (), stop_at: str = "", *, judged: bool = True
    ) -> Run:
        path = validated(recipe, tmp_path) if judged else recipe()
        run = planned(path, tmp_path, run_id=run_id, iterations=2, overrides=overrides)
        imagined = Weighted(run, tmp_path, moves)
        imagined.stop_at |= {stop_at: StageError("stopped by the test")}
        with Tracker(run, lambda _: None) as tracker, suppress(StageError):
            imagined.done = tracker.done
            loop.make(run, imagined.launch)
        return run

    return make_it


ZERO = np.zeros(2, "f4")
STORE = "store"


def rows(found: Any) -> dict[str, tuple[Any, Any]]:
    return {one.name: (one.a, one.b) for one in found}


def test_a_run_made_twice_is_equal_in_everything(make_run: Make, tmp_path: Path):
    for name in ("one", "two"):
        make_run(name, Moves(UP, ZERO))
    found = compare("one", "two", str(tmp_path / STORE))
    assert (found.settings, found.origins) == ([], [])
    assert found.artifacts.equal
    assert found.artifacts.words.startswith("all ")
    assert all(one.equal for one in found.data)
    assert all(one.change.mean == 0 for one in found.scores)
    assert found.weights is not None
    assert found.weights.words == "equal byte for byte"
    assert found.pictures is not None
    assert {pair.apart for pair in found.pictures.pairs} == {0.0}


def test_runs_part_at_the_first_artifact_that_a_setting_changes(make_run: Make, tmp_path: Path):
    make_run("one", Moves(UP, ZERO))
    make_run("two", Moves(RIGHT, ZERO, gain=0.25), ("train.optm_lr=0.5",))
    found = compare("one", "two", str(tmp_path / STORE))
    assert rows(found.settings) == {"train.optm_lr": (0.001, 0.5)}
    assert found.artifacts.first == "iteration-0000/update"
    assert not found.artifacts.equal
    # The policy, its embeddings, its export, held-out samples and scores, and the first rollout with its scores.
    assert found.artifacts.before == 7
    held_out = {one.name: one for one in found.scores if one.where == "held-out, policy 2"}["ocr"]
    # Sample by sample every score is 0.25 higher, so there is nothing left to be uncertain of.
    assert held_out.how == "sample by sample"
    assert held_out.change.mean == pytest.approx(0.25)
    assert held_out.change.error == pytest.approx(0, abs=1e-12)
    assert held_out.b.mean - held_out.a.mean == pytest.approx(0.25)


LOSSES = {"a": 1.0, "b": 3.0, "c": 5.0, "d": 9.0}
LOWER = {"a": 0.9, "b": 2.9, "c": 4.9, "d": 8.7}
SEEN_BY_A = math.sqrt(35 / 3 / 4)
"""Standard error of the mean of the losses of A: items differ much more than the runs do."""


@pytest.mark.parametrize(
    ("losses", "seed", "how", "change", "error"),
    [
        # The differences are -0.1, -0.1, -0.1 and -0.3, whose standard deviation is 0.1.
        (LOWER, 0, "item by item", -0.15, 0.1 / 2),
        (LOWER, 5, "item by item, other noise", -0.15, 0.1 / 2),
        # Item d is of one run alone.
        ({"a": 0.9, "b": 2.9, "c": 4.9, "e": 70.0}, 0, "item by item", -0.1, 0.0),
        (
            {item * 2: loss + 1 for item, loss in LOSSES.items()},
            0,
            "other items",
            1.0,
            math.hypot(SEEN_BY_A, SEEN_BY_A),
        ),
    ],
)
def test_held_out_losses_are_compared_item_by_item(
    make_run: Make, tmp_path: Path, losses: dict[str, float], seed: int, how: str, change: float, error: float
):
    make_run("one", Moves(UP, ZERO, losses=LOSSES), (HELD_OUT_MEDIA,))
    make_run("two", Moves(RIGHT, ZERO, losses=losses), (HELD_OUT_MEDIA, "train.optm_lr=0.5", f"validation.seed={seed}"))
    found = {one.name: one for one in compare("one", "two", str(tmp_path / STORE)).scores}["val/avg_loss"]
    assert (found.where, found.how) == ("held-out, policy 2", how)
    assert (found.change.mean, found.change.error) == (pytest.approx(change), pytest.approx(error, abs=1e-9))
    if "d" in losses or how == "other items":
        assert (found.a.mean, found.a.error) == (pytest.approx(4.5), pytest.approx(SEEN_BY_A))


def test_rewards_of_rollouts_are_compared_prompt_by_prompt(make_run: Make, tmp_path: Path):
    make_run("one", Moves(UP, ZERO, rewards=(0.1, 0.9)), judged=False)
    make_run("two", Moves(RIGHT, ZERO, rewards=(0.2, 1.1)), ("train.optm_lr=0.5",), judged=False)
    (found,) = compare("one", "two", str(tmp_path / STORE)).scores
    assert (found.name, found.where, found.how) == ("ocr", "training, iteration 1", "prompt by prompt")
    assert (found.a.mean, found.a.error) == (pytest.approx(0.5), pytest.approx(0.4))
    # The two prompts differ by 0.8 and 0.9 in each run, but their differences are 0.1 and 0.2.
    assert (found.change.mean, found.change.error) == (pytest.approx(0.15), pytest.approx(0.05))
    assert (found.change.n, found.change.clusters) == (8, 2)


def test_weights_are_measured_in_closed_form(make_run: Make, tmp_path: Path):
    make_run("one", Moves(3 * UP, ZERO))
    make_run("two", Moves(2 * UP + 2 * RIGHT, 4 * RIGHT))
    found = compare("one", "two", str(tmp_path / STORE)).weights
    assert found is not None
    # A goes from (0, 0) to (0, 6), B from (4, 0) to (8, 4).
    assert (found.version, found.moved_a, found.moved_b) == (2, 6.0, pytest.approx(math.sqrt(32)))
    assert (found.began, found.apart) == (4.0, pytest.approx(math.hypot(8, 2)))
    assert found.cosine == pytest.approx(math.sqrt(0.5))
    assert [(one.name, one.share) for one in found.tensors] == [("moves", pytest.approx(math.hypot(8, 2) / 6))]
    assert found.words == "1 of 2 tensors differ"


def test_weights_of_other_shapes_are_counted_and_not_measured(make_run: Make, tmp_path: Path):
    make_run("one", Moves(UP, ZERO))
    make_run("two", Moves(np.ones(3, "f4"), np.zeros(3, "f4")))
    found = compare("one", "two", str(tmp_path / STORE)).weights
    assert found is not None
    assert found.words == "other tensors: 0 only in A, 0 only in B, 1 of another shape"
    assert math.isnan(found.apart)


def test_other_seeds_are_named_and_prompts_are_still_paired(make_run: Make, tmp_path: Path):
    make_run("one", Moves(UP, ZERO))
    make_run("two", Moves(UP, ZERO), ("train.seed=5", "validation.seed=3"))
    found = compare("one", "two", str(tmp_path / STORE))
    data = {one.what: one for one in found.data}
    assert (data["seed"].a, data["seed"].b, data["seed"].equal) == ("0", "5", False)
    assert data["held-out prompts"].equal
    assert data["held-out prompts"].shared == "2 in both"
    assert {one.how for one in found.scores if one.where.startswith("held-out")} == {"prompt by prompt, other seeds"}
    assert found.pictures is not None
    assert ", " in found.pictures.pairs[0].seeds


def test_a_run_that_stopped_is_compared_as_far_as_it_went(make_run: Make, tmp_path: Path):
    make_run("one", Moves(UP, ZERO))
    make_run("two", Moves(UP, ZERO), stop_at="iteration-0001/rollout")
    found = compare("one", "two", str(tmp_path / STORE))
    assert not found.artifacts.first
    assert not found.artifacts.equal
    assert found.artifacts.words.endswith("one run went further")
    counts = {one.stage: (one.equal, one.only_a, one.only_b) for one in found.artifacts.stages}
    assert counts["update"] == (1, 1, 0)
    assert found.weights is not None
    assert found.weights.version == 1
    assert found.pictures is not None
    assert found.pictures.where == "iteration 0"


def test_numerics_are_compared_stage_by_stage(make_run: Make, tmp_path: Path):
    make_run("one", Moves(UP, ZERO))
    # Policy 0 is the newest that it has.
    make_run("two", Moves(UP, ZERO), stop_at="embed")
    make_run("three", Moves(UP, ZERO, first_ranks=4))
    assert compare("one", "two", str(tmp_path / STORE)).origins == []
    assert rows(compare("one", "three", str(tmp_path / STORE)).origins) == {
        "numerics of policy: world_size": ("3", "4")
    }


def test_runs_that_hold_nothing_out_are_compared_by_their_rollouts(make_run: Make, tmp_path: Path):
    for name in ("one", "two"):
        make_run(name, Moves(UP, ZERO), judged=False)
    found = compare("one", "two", str(tmp_path / STORE))
    assert {one.where for one in found.scores} == {"training, iteration 1"}
    assert found.pictures is not None
    assert found.pictures.where == "iteration 1"


def test_a_page_and_json_say_the_same(make_run: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make_run("one", Moves(UP, ZERO))
    run = make_run("two", Moves(RIGHT, ZERO, gain=0.25), ("train.optm_lr=0.5",))
    page = Path(write_page(compare("one", run.url, str(tmp_path / STORE)), str(tmp_path / "pages" / "diff.html")))
    html = page.read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match=r"cannot write .*/pages: Is a directory; name another"):
        write_page(compare("one", run.url, str(tmp_path / STORE)), str(page.parent))
    for words in (
        "the runs part at iteration-0000/update",
        "train.optm_lr",
        "0.001",
        "0.5",
        "+0.25",
        "cosine of the moves",
    ):
        assert words in html, words
    linked = [part.partition('"')[0] for part in html.split('class="shot" href="')[1:]]
    assert linked
    assert all((page.parent / one).is_file() for one in linked)
    assert html.count("<svg") >= 3
    assert "http" not in html.replace("http-equiv", "")
    odd = (tmp_path / STORE).rename(tmp_path / "store 100% #1")
    assert write_page(compare("one", "two", str(odd)), str(page)) == str(page)
    (linked,) = re.findall('class="shot" href="([^"]*)"', page.read_text(encoding="utf-8"))[:1]
    assert (page.parent / unquote(urlsplit(linked).path)).is_file()
    app(["diff", "one", "two", "--store", str(odd), "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (found["equal"], found["first"]) == (False, "iteration-0000/update")
    assert found["settings"] == [{"name": "train.optm_lr", "a": 0.001, "b": 0.5, "decides": True}]
    assert found["weights"]["cosine"] == 0.0
    assert found["pictures"][0]["apart"] == 0.0


def test_text_of_every_part_is_printed(make_run: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make_run("one", Moves(UP, ZERO))
    make_run("two", Moves(RIGHT, ZERO), ("train.optm_lr=0.5",))
    app(["diff", "one", "two", "--store", str(tmp_path / STORE)], standalone_mode=False)
    said = capsys.readouterr().out
    for words in (
        "Settings that differ",
        "Data",
        "Artifacts",
        "Held-out, policy 2",
        "Weights of policy 2",
        "Pictures:",
    ):
        assert words in said, words
