"""Samples that a report shows."""

import pandas as pd
import pytest

from stages.reporting import choosing


def table_of(scores: list[float | None]) -> pd.DataFrame:
    prompts = ["a"] * 3 + ["b"] * 3
    return pd.DataFrame(
        {
            "prompt_id": prompts,
            "score": pd.Series(scores, dtype="float64"),
            "failed": [score is None for score in scores],
        }
    )


def test_samples_are_chosen_by_their_rewards_and_some_regardless_of_them():
    found = choosing.of_rollout(table_of([0.0, 1.0, None, 0.25, 0.5, 0.5]))
    assert found["best"][:2] == (1, 4)
    assert found["worst"][0] == 0
    assert found["widest"] == (1, 0, 4, 3)
    assert found["failed"] == (2,)
    assert found["typical"] == (0, 1, 3, 5)


@pytest.mark.parametrize(
    ("count", "most", "places"),
    [(0, 8, []), (1, 8, [0]), (3, 8, [0, 1, 2]), (9, 8, [0, 1, 2, 3, 4, 5, 6, 8]), (101, 3, [0, 50, 100]), (5, 1, [0])],
)
def test_shown_values_are_evenly_spaced_and_include_both_ends(count: int, most: int, places: list[int]):
    assert choosing.evenly(range(count), most) == places
