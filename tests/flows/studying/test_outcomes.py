"""Numbers of studies against closed forms: differences from others, errors over prompts and over seeds."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from cosmos_rl_core.estimates.estimate import Estimate
from flows.studying.outcomes import Outcome, against, curves, outcomes_of, paired
from flows.studying.report import Report, Row, page_of
from flows.studying.study import Member, Study
from tests.flows.judged_runs import HELD_OUT, judged_by


def outcome(seed: int = 0, control: int = 0, values: Any = None, figures: Any = None, **changes: Any) -> Outcome:
    member = Member(run=f"r{seed}{control}", setting="s", seed=seed, control=control)
    table = None
    if values is not None:
        table = pd.DataFrame({"value": values, "prompt_id": ["p", "p", "q", "q"]}, index=list("abcd"))
    facts: dict[str, Any] = {"by": "held-out ocr", "first": 0, "judged_by": "x", "drifts": {}}
    return Outcome(member=member, figures=figures or {0: 0.0, 4: 1.0}, samples=table, **facts | changes)


def test_the_difference_from_one_run_is_paired_by_prompts() -> None:
    mine, other = outcome(values=[1.0, 2.0, 4.0, 5.0]), outcome(control=1, values=[1.0, 1.0, 1.0, 3.0])
    found = against(mine, [other])
    # Differences by prompt: 0.5 and 2.5.
    assert found.mean == pytest.approx(1.5)
    assert found.error == pytest.approx(1.0)
    assert found.clusters == 2


def test_controls_that_differ_by_chance_add_the_error_of_one_run_and_of_their_mean() -> None:
    mine = outcome(values=[2.0, 2.0, 4.0, 4.0])
    controls = [outcome(control=i, values=[i, i, i, i]) for i in (1, 2, 3)]
    found = against(mine, controls, by_chance=True)
    assert found.mean == pytest.approx(1.0)
    # Over prompts: differences 0 and 2. The controls have the means 1, 2 and 3, a variance of 1.
    assert found.error == pytest.approx(math.hypot(1.0, math.sqrt(1 + 1 / 3)))
    assert against(mine, controls).error == pytest.approx(1.0)


def test_chance_has_the_error_that_runs_without_a_reward_have() -> None:
    generator = np.random.default_rng(0)
    off = []
    for _ in range(300):
        runs = [outcome(control=i, values=np.full(4, generator.normal())) for i in range(4)]
        found = against(runs[0], runs[1:], by_chance=True)
        off.append(found.mean / found.error)
    # A t statistic of two degrees of freedom: its quartiles are at 0.816.
    assert np.mean(np.abs(off) < 0.816) == pytest.approx(0.5, abs=0.09)


def test_one_control_has_no_error() -> None:
    found = against(outcome(values=[2.0, 2.0, 4.0, 4.0]), [outcome(control=1, values=[1.0] * 4)], by_chance=True)
    assert found.mean == 2.0
    assert math.isnan(found.error)


def test_samples_that_a_control_could_not_score_are_left_out_for_all() -> None:
    mine = outcome(values=[2.0, 2.0, 4.0, 4.0])
    controls = [outcome(control=1, values=[math.nan, 1.0, 3.0, 3.0]), outcome(control=2, values=[9.0, 2.0, 3.0, 3.0])]
    found = against(mine, controls, by_chance=True)
    # Over the last three: differences 0.5, 1 and 1; the controls have the means 7/3 and 8/3.
    assert found.n == 3
    assert found.mean == pytest.approx(2.5 / 3)
    assert found.error**2 - against(mine, controls).error ** 2 == pytest.approx((1 / 3) ** 2 / 2 * 1.5)


def test_samples_without_a_score_on_one_side_are_left_out_on_both() -> None:
    mine = outcome(values=[math.nan, 2.0, 4.0, 5.0])
    found = against(mine, [outcome(control=1, values=[1.0, 1.0, math.nan, 3.0])])
    assert found.n == 2
    assert found.mean == pytest.approx(1.5)


@pytest.mark.parametrize("other", [{"figures": {0: 0.0, 3: 1.0}}, {"by": "held-out jpeg"}, {"judged_by": "y"}])
def test_other_versions_and_other_numbers_are_not_compared(other: dict[str, Any]) -> None:
    given: dict[str, Any] = {"values": [1.0, 1.0, 1.0, 1.0], "control": 1}
    found = against(outcome(values=[1.0, 2.0, 3.0, 4.0]), [outcome(**given | other)])
    assert found.n == 0
    assert math.isnan(found.mean)


@pytest.mark.parametrize(("gate", "counted", "mean"), [(1.0, 2, 0.6), (None, 1, 0.7)])
def test_samples_that_a_gate_holds_back_or_could_not_score_do_not_count(
    gate: float | None, counted: int, mean: float, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(HELD_OUT, "pixel_statistics", [[1.0] * 4, [1.0] * 4, [gate, 1.0, 0.0, 1.0]])
    run = judged_by(recipe, tmp_path, "")
    member = Member(run=run.plan.run_id, setting="s", seed=0)
    study = Study(name="mine", of="seeds", source="recipe", until=2, members=(member,))
    (found,) = outcomes_of(study, run.store_url)
    # Of 0.5, 0.7, 1.0 and none, the gate holds back the third.
    assert found.estimate.mean == pytest.approx(mean)
    assert found.figures[2] == pytest.approx(mean)
    assert found.estimate.n == counted


def test_losses_are_compared_without_an_error() -> None:
    others = [outcome(control=i, figures={4: 1.0 * i}) for i in (1, 2)]
    for by_chance in (False, True):
        found = against(outcome(figures={4: 0.5}), others, by_chance=by_chance)
        assert found.mean == pytest.approx(-1.0)
        assert math.isnan(found.error)


def test_settings_are_paired_by_seed_at_the_newest_version_that_both_have() -> None:
    mine = [outcome(seed, figures={0: 0.0, 2: 1.0 + seed, 4: 9.0}) for seed in (0, 1)]
    other = [outcome(seed, figures={0: 0.0, 2: 0.5 * seed}) for seed in (0, 1, 2)]
    found = paired(mine, other)
    # 1 - 0 and 2 - 0.5.
    assert found.mean == pytest.approx(1.25)
    assert found.error == pytest.approx(0.25)


def test_settings_that_share_only_the_first_version_are_not_compared() -> None:
    assert paired([outcome(figures={0: 0.0, 4: 1.0})], [outcome(figures={0: 0.0, 2: 1.0})]).n == 0


def test_a_curve_has_the_versions_that_all_runs_judged() -> None:
    runs = [outcome(0, figures={0: 1.0, 2: 2.0, 4: 3.0}), outcome(1, figures={0: 3.0, 4: 5.0})]
    assert [(k, found.mean, found.error) for k, found in curves(runs)] == [(0, 2.0, 1.0), (4, 4.0, 1.0)]
    assert [*curves([])] == []


def row(setting: str, some: list[Outcome], above: Estimate, ended: str = "") -> Row:
    return Row(setting, tuple(some), some[0].estimate, above, above, ended, some[0].by)


def test_a_report_says_what_was_compared_and_what_ended() -> None:
    first = outcome(values=[1.0, 2.0, 4.0, 5.0])
    far = outcome(control=1, values=[0.0, 0.0, 1.0, 1.0], figures={0: 0.0, 1: 0.5}, drifts={0: 0.25})
    study = Study(name="mine", of="what-if", source="run", until=4, members=(first.member, far.member))
    rows = (
        row("as it was", [first], Estimate.missing()),
        row("lr=1", [far], Estimate(-1.5, 0.5, 4, 2), "ended at policy 1: far"),
    )
    report = Report(study, "store/studies/mine", rows, "held-out ocr")
    assert [*report.cells()] == [
        ["as it was", "held-out ocr 3.0 ± 1.5", "4", "", "", "", "r00"],
        ["lr=1", "held-out ocr 0.50 ± 0.50", "1", "−1.50 ± 0.50", "−1.50 ± 0.50", "0.25", "r01"],
    ]
    lines = [*report.lines()]
    assert lines[1].endswith("−1.50 ± 0.50 against shuffled rewards, drift 0.25, ended early")
    assert "against" not in lines[0]
    page = page_of(report).decode()
    for words in ("lr=1: ended at policy 1: far", "−1.50 ± 0.50", "No training sample was generated", "<svg"):
        assert words in page
    json.dumps(report.as_json(), allow_nan=False)
    assert report.as_json()["settings"][1]["above_controls"] == {"mean": -1.5, "error": 0.5}


def test_every_two_comparable_settings_have_a_difference() -> None:
    low, high = (outcome(seed, values=[v, v, v + 1, v + 1]) for seed, v in ((0, 1.0), (1, 1.5)))
    unlike = outcome(2, values=[0.0] * 4, judged_by="y")
    rows = tuple(row(name, [one], Estimate.missing()) for name, one in (("a", low), ("b", high), ("c", unlike)))
    study = Study(name="mine", of="seeds", source="recipe", until=4, members=(low.member, high.member))
    report = Report(study, "store/studies/mine", rows, "held-out ocr")
    assert [*report.matrix()] == [["a", "", "−0.5 ± 0", ""], ["b", "0.5 ± 0", "", ""], ["c", "", "", ""]]
    assert report.as_json()["differences"] == [
        {"setting": "a", "above": "b", "mean": -0.5, "error": 0.0},
        {"setting": "b", "above": "a", "mean": 0.5, "error": 0.0},
    ]
    assert "Differences" in page_of(report).decode()
