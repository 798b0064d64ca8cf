"""Excerpts of the answers of a VLM, against numbers worked out by hand."""

import math
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from cosmos_rl_core.canonical import canonical_json
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Input, Request
from stages.artifacts.slots import input_of
from stages.formats.tables import read_table, to_parquet
from stages.reporting.book import Book, Piece
from stages.reporting.excerpt import HELD_OUT_LOSS, Question
from stages.reporting.page import report_page
from stages.vlm.contracts import VlmEvaluate, VlmRef
from stages.vlm.evaluated import summary_of
from tests.hand_made import make

INPUTS = ("policy", "tokens")


def answers(
    folder: Path, k: int, loss_sums: list[float], correct: list[bool], most_tokens: int = 3, whole: Any = True
) -> Artifact:
    """Answers of policy version k to three questions with 1, 3 and 2 labels, the last of another dataset."""
    table = pd.DataFrame({"number": range(3), "id": ["a", "b", "c"], "source": ["one", "one", "other"]})
    table = table.assign(loss_sum=loss_sums, label_tokens=[1, 3, 2], expected="x", answer=f"x{k}", whole=whole)
    config: Any = VlmEvaluate(
        vlm=VlmRef(path="m", digest="d"), lora=None, trains=("language",), sources={}, max_new_tokens=most_tokens
    )
    slot = str(folder / f"{k}-{most_tokens}")
    given = {name: (Input(url=name, generation=1, manifest="m", fingerprint="f", content="c"),) for name in INPUTS}
    request = Request(stage="vlm_evaluate", slot=slot, seed=0, iteration=k, config=config, inputs=given)
    shown = [Question(number=n, fixed=n < 2, text=f"Which <{n}>?").model_dump() for n in range(3)]
    files = {VlmEvaluate.ANSWERS: to_parquet(table.assign(correct=correct)), VlmEvaluate.SHOWN: canonical_json(shown)}
    make(request, files)
    return Artifact(input_of(slot))


def test_losses_and_correct_answers_are_means_with_errors_and_changes(tmp_path: Path):
    before = answers(tmp_path, 0, [3.0, 9.0, 6.0], [False, True, False])
    after = answers(tmp_path, 2, [1.0, 7.0, 4.0], [True, True, False])
    piece = Piece.read(after, first=before)
    # 12 over 6 labels is 2; the conversations lack -1, 1 and 0 to it, with variance 1: sqrt(3 * 1) / 6.
    assert (piece.k, piece.loss.mean, piece.loss.error, piece.loss.n) == (2, 2.0, pytest.approx(3**0.5 / 6), 3)
    one, other = piece.excerpt.scores
    assert (one.name, one.mean, one.n) == ("correct answers: one", 1.0, 2)
    assert (other.name, other.mean, other.n, other.error) == ("correct answers: other", 0.0, 1, None)
    changes = {change.of: (change.mean, change.better, change.worse) for change in piece.excerpt.changes}
    assert changes["correct answers: one"] == (0.5, 1, 0)
    assert changes["correct answers: other"] == (0.0, 0, 0)
    # Of a label 3 -> 2, as shown next to it, though the mean over conversations falls by 11 / 9.
    assert changes[HELD_OUT_LOSS] == (pytest.approx(piece.loss.mean - Piece.read(before).loss.mean), 0, 3)
    assert changes[HELD_OUT_LOSS][0] == pytest.approx(-1)
    page = report_page(Book("run", "", judged=[Piece.read(before), piece])).decode()
    assert "Held-out correct answers: one" in page
    assert "share of correct answers of conversations that are never trained on" in page


def test_a_long_conversation_that_got_worse_outweighs_two_short_better_ones(tmp_path: Path):
    """A printed change is the difference of the printed losses, in sign too."""
    before = answers(tmp_path, 0, [2.0, 3.0, 4.0], [False] * 3)
    after = answers(tmp_path, 2, [1.0, 6.0, 3.0], [False] * 3)
    piece = Piece.read(after, first=before)
    (change,) = (one for one in piece.excerpt.changes if one.of == HELD_OUT_LOSS)
    assert change.mean == pytest.approx(10 / 6 - 9 / 6)
    assert (change.better, change.worse) == (1, 2)
    # Influences of the change: (a_c - R b_c) / 6 after minus before.
    moved = [(1 - 10 / 6) / 6 - (2 - 1.5) / 6, (6 - 5) / 6 - (3 - 4.5) / 6, (3 - 20 / 6) / 6 - (4 - 3) / 6]
    assert change.error == pytest.approx(math.sqrt(1.5 * sum(one * one for one in moved)))


def test_the_newest_answers_are_shown_next_to_version_0s(tmp_path: Path):
    before = answers(tmp_path, 0, [3.0, 9.0, 6.0], [False, True, False])
    after = answers(tmp_path, 2, [1.0, 7.0, 4.0], [True, True, False])
    page = report_page(Book("run", "", judged=[Piece.read(before), Piece.read(after, first=before)])).decode()
    found = page[page.index('<section id="answers"') :].partition("</section>")[0]
    assert "Answers of policy 2" in found
    assert re.findall(r"Which &lt;(\d)&gt;\?", found) == ["0", "1", "2"]
    assert re.findall(r"<b>(right|wrong)</b>", found) == ["right", "right", "wrong"]
    rows = "<dt>expected</dt><dd>x</dd><dt>policy 0</dt><dd>x0</dd><dt>policy 2</dt><dd>x2</dd>"
    assert found.count(rows) == 3
    assert found.index("Which &lt;1") < found.index("More wrong answers") < found.index("Which &lt;2")


def test_answers_that_were_cut_off_are_counted_and_shown(tmp_path: Path):
    artifact = answers(tmp_path, 1, [3.0, 9.0, 6.0], [False, True, False])
    table = read_table(artifact, VlmEvaluate.ANSWERS).assign(whole=[False, True, True])
    found = summary_of(table, generated=True)
    assert (found["unfinished"], "unfinished" in summary_of(table.assign(whole=True), generated=True)) == (1, False)
    cut = answers(tmp_path / "cut", 1, [3.0, 9.0, 6.0], [False, True, False], whole=[False, True, True])
    page = report_page(Book("run", "", judged=[Piece.read(cut)])).decode()
    assert re.findall(r"<b>(right|wrong|cut off)</b>", page) == ["cut off", "right", "wrong"]
    assert "cut off at max_new_tokens = 3" in page


def test_without_generated_answers_there_is_only_a_loss(tmp_path: Path):
    piece = Piece.read(answers(tmp_path, 0, [1.0, 7.0, 4.0], [False] * 3, most_tokens=0))
    assert (piece.loss.mean, piece.excerpt.scores) == (2.0, ())


def test_a_loss_that_is_not_finite_has_no_mean(tmp_path: Path):
    piece = Piece.read(answers(tmp_path, 0, [float("inf"), 7.0, 4.0], [False] * 3))
    assert piece.excerpt.loss is not None
    assert (piece.excerpt.loss.mean, piece.loss.n) == (None, 0)
