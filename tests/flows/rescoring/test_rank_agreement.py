"""Rank correlation within groups, and the samples whose ranks differ most."""

import math

import numpy as np
import pandas as pd
import pytest

from flows.rescoring.agreement import Agreement
from flows.rescoring.scatter import scatter


def table(groups: list[tuple[int, str, list[float], list[float]]]) -> pd.DataFrame:
    """Samples by iteration, prompt, old and new scores."""
    rows = [
        {"k": k, "sample_id": f"{k}-{prompt}-{n}", "prompt_id": prompt, "old_reward": a, "new_reward": b}
        for k, prompt, old, new in groups
        for n, (a, b) in enumerate(zip(old, new, strict=True))
    ]
    return pd.DataFrame(rows)


def test_the_correlation_is_spearmans_within_each_group_and_its_error_is_over_prompts() -> None:
    rng = np.random.default_rng(0)
    drawn = [(k, f"p{p}", rng.permutation(12), rng.permutation(12)) for p in range(5) for k in range(2)]
    # Offsets between groups say nothing of the order within them.
    groups = [(k, p, [*(a + 100.0 * n)], [*(b - 70.0 * n)]) for n, (k, p, a, b) in enumerate(drawn)]
    found = Agreement.between("rollouts", table(groups))
    # Spearman's formula for ranks without ties.
    expected = {(k, p): 1 - 6 * sum((a - b) ** 2) / (12 * (12**2 - 1)) for k, p, a, b in drawn}
    assert found.rank_correlation == pytest.approx(np.mean([*expected.values()]))
    by_prompt = [np.mean([expected[k, f"p{p}"] for k in range(2)]) for p in range(5)]
    assert found.error == pytest.approx(np.std(by_prompt, ddof=1) / math.sqrt(5))
    assert (found.prompts, found.groups, found.samples) == (5, 10, 120)


def test_equal_rewards_agree_and_opposite_ones_disagree() -> None:
    scores = [0.1, 0.4, 0.2]
    assert Agreement.between("rollouts", table([(0, "a", scores, scores)])).rank_correlation == 1.0
    opposite = Agreement.between("rollouts", table([(0, "a", scores, [-s for s in scores])]))
    assert opposite.rank_correlation == -1.0
    assert opposite.error is None
    assert {(one.old_rank, one.new_rank) for one in opposite.apart} == {(1.0, 3.0), (3.0, 1.0)}


def test_groups_that_say_nothing_and_samples_without_a_score_are_left_out_and_counted() -> None:
    nan = math.nan
    found = Agreement.between(
        "evaluations",
        table(
            [
                (0, "whole", [1, 2, 3], [1, 3, 2]),
                (0, "small", [1, 2, nan], [1, 2, 3]),
                (0, "equal", [1, 1, 1], [1, 2, 3]),
                (0, "gone", [nan, nan, nan], [1, nan, 3]),
            ]
        ),
    )
    assert (found.groups, found.too_small, found.without_spread) == (1, 2, 1)
    assert (found.failed_old, found.failed_new) == (4, 1)
    assert found.rank_correlation == pytest.approx(0.5)
    assert found.left_out == (
        "2 groups with fewer than 3 samples that both scored; 1 group whose scores are all equal; "
        "4 samples without the old reward; 1 sample without the new reward"
    )


def test_nothing_to_compare_has_no_number() -> None:
    found = Agreement.between("rollouts", table([(0, "a", [1, 1], [1, 2])]))
    assert (found.rank_correlation, found.error, found.groups, found.apart) == (None, None, 0, [])
    assert found.words == "no group has a rank correlation"
    assert scatter(found.table) == ""


def test_the_samples_with_the_largest_difference_of_ranks_come_first() -> None:
    old, new = [1.0, 2.0, 3.0, 4.0, 5.0], [5.0, 2.0, 3.0, 4.0, 1.0]
    found = Agreement.between("rollouts", table([(3, "a", old, new), (4, "b", old, old)]))
    assert [(one.k, one.sample, one.old_rank, one.new_rank) for one in found.apart] == [
        (3, "3-a-0", 5.0, 1.0),
        (3, "3-a-4", 1.0, 5.0),
    ]
    assert str(scatter(found.table)).count("<circle") == 10
