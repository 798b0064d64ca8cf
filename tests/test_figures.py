"""Figures of pages are those that ``python -m docs.figures`` writes from stored results."""

import re

import pytest

from cosmos_rl_core.estimates.estimate import mean_of
from docs import drift, figures
from tests.pages import ROOT


def test_the_pages_hold_what_the_command_would_write():
    stale = [str(path.relative_to(ROOT)) for path, text in figures.pages().items() if text != path.read_text("utf-8")]
    assert not stale, "run `python -m docs.figures`"


def test_errors_in_print_are_over_the_prompts_of_the_stored_scores():
    """The table of README, from nothing but the scores."""
    scores = figures.HeldOut.read(ROOT / "docs" / "measured" / "held-out-nft-0.json")
    assert {len(some) for some in scores.first.values()} == {16}
    assert len(scores.first) == len(scores.last) == 40
    row = re.search(r"\| 0 \| (.*?) ± (.*?) \| (.*?) ± (.*?) \|", (ROOT / "README.md").read_text("utf-8"))
    assert row is not None
    for told, error, found in zip(row.groups()[::2], row.groups()[1::2], (scores.first, scores.last), strict=True):
        means = [sum(some) / len(some) for some in found.values()]
        # Prompts of equal size: the error of the mean of their means.
        spread = sum((mean - sum(means) / 40) ** 2 for mean in means) / 39
        assert float(told) == pytest.approx(sum(means) / 40, abs=5e-4)
        assert float(error) == pytest.approx((spread / 40) ** 0.5, abs=5e-4)
        assert mean_of(means, range(40)).error == pytest.approx((spread / 40) ** 0.5)


def test_false_alarms_count_drift_towards_a_bound_alone():
    names = {"luma": [2.0, -9.0], "grid_energy": [-9.0, 6.0], "group_diversity": [9.0, -3.0]}
    bad = {name: [0.0, -9.0] for name in names}
    rows = drift.rows([drift.Drift(["ocr"], names), drift.Drift([drift.HACKED], bad)])
    assert sorted(rows) == [
        ["grid energy", "6.0", "1 of 2", "0 of 2", "none", "−9"],
        ["group diversity", "3.0", "0 of 2", "0 of 2", "iteration 2", "−9"],
        ["luma", "9.0", "1 of 2", "1 of 2", "iteration 2", "−9"],
    ]


def test_a_page_that_lost_the_place_of_a_figure_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path):
    pages = {path.relative_to(ROOT): path.read_text("utf-8") for path in figures.pages()}
    for name, text in pages.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text.replace("after 16 iterations |", "afterwards |"), encoding="utf-8")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"docs/results\.md has 0 places"):
        figures.pages()
