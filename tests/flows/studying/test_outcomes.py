"""Numbers of studies against closed forms: differences from others, errors over prompts and over seeds."""

import math
from typing import Any

import pandas as pd
import pytest

from flows.studying.outcomes import Outcome, against, curves, over_seeds, paired
from flows.studying.study import Member


def outcome(seed: int = 0, control: int = 0, values: Any = None, figures: Any = None, **changes: Any) -> Outcome:
    member = Member(run=f"r{seed}{control}", setting="s", seed=seed, control=control)
    table = None
    if values is not None:
        table = pd.DataFrame({"value": values, "prompt_id": ["p", "p", "q", "q"]}, index=list("abcd"))
    facts: dict[str, Any] = {"by": "held-out ocr", "first": 0, "trained": 4, "planned": 4, "drifts": {}}
    return Outcome(member=member, figures=figures or {0: 0.0, 4: 1.0}, samples=table, **facts | changes)


def test_the_difference_from_one_run_is_paired_by_prompts() -> None:
    mine, other = outcome(values=[1.0, 2.0, 4.0, 5.0]), outcome(control=1, values=[1.0, 1.0, 1.0, 3.0])
    found = against(mine, [other])
    # Differences by prompt: 0.5 and 2.5.
    assert found.mean == pytest.approx(1.5)
    assert found.error == pytest.approx(1.0)
    assert found.clusters == 2


def test_controls_that_differ_add_to_the_error() -> None:
    mine = outcome(values=[2.0, 2.0, 4.0, 4.0])
    controls = [outcome(control=i, values=[i, i, i, i]) for i in (1, 2, 3)]
    found = against(mine, controls)
    assert found.mean == pytest.approx(1.0)
    # Over prompts: differences 0 and 2. Over the three controls, whose means are 1, 2 and 3: 1 / sqrt(3).
    assert found.error == pytest.approx(math.hypot(1.0, 1 / math.sqrt(3)))


def test_samples_without_a_score_on_one_side_are_left_out_on_both() -> None:
    mine = outcome(values=[math.nan, 2.0, 4.0, 5.0])
    found = against(mine, [outcome(control=1, values=[1.0, 1.0, math.nan, 3.0])])
    assert found.n == 2
    assert found.mean == pytest.approx(1.5)


@pytest.mark.parametrize("other", [{"figures": {0: 0.0, 3: 1.0}}, {"by": "held-out jpeg"}, {"values": None}])
def test_other_versions_and_other_numbers_are_not_compared(other: dict[str, Any]) -> None:
    given: dict[str, Any] = {"values": [1.0, 1.0, 1.0, 1.0], "control": 1}
    found = against(outcome(values=[1.0, 2.0, 3.0, 4.0]), [outcome(**given | other)])
    assert found.n == 0
    assert math.isnan(found.mean)


def test_over_seeds_the_error_is_that_of_a_mean() -> None:
    found = over_seeds([1.0, 2.0, 3.0, 6.0])
    assert found.mean == 3.0
    assert found.error == pytest.approx(math.sqrt(14 / 3 / 4))


def test_settings_are_paired_by_seed_at_the_newest_version_that_both_have() -> None:
    mine = [outcome(seed, figures={0: 0.0, 2: 1.0 + seed, 4: 9.0}) for seed in (0, 1)]
    other = [outcome(seed, figures={0: 0.0, 2: 0.5 * seed}) for seed in (0, 1, 2)]
    found = paired(mine, other)
    # 1 - 0 and 2 - 0.5.
    assert found.mean == pytest.approx(1.25)
    assert found.error == pytest.approx(0.25)


def test_a_curve_has_the_versions_that_all_runs_judged() -> None:
    runs = [outcome(0, figures={0: 1.0, 2: 2.0, 4: 3.0}), outcome(1, figures={0: 3.0, 4: 5.0})]
    assert [(k, found.mean, found.error) for k, found in curves(runs)] == [(0, 2.0, 1.0), (4, 4.0, 1.0)]
    assert [*curves([])] == []
