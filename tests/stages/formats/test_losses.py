"""Losses by item, and what sums them up."""

import numpy as np
import pandas as pd
import pytest

from stages.formats.losses import by_item, summary_of


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_there_is_no_mean_if_one_item_has_no_finite_loss(broken: float):
    levels = {"a": [1.0, 3.0], "b": [3.0, broken], "c": [6.0, 6.0]}
    table = pd.DataFrame([{"item_id": item, "loss": loss} for item, losses in levels.items() for loss in losses])
    items = by_item(table)
    assert summary_of(items) == {"loss": None, "standard_error": None, "items": 3, "nonfinite": 1}
    assert summary_of(items[:1]) == {"loss": 2.0, "standard_error": None, "items": 1}
    assert summary_of(items[::2]) == {"loss": 4.0, "standard_error": pytest.approx(2.0), "items": 2}


def test_clips_of_one_medium_count_as_one():
    """Three clips of each of two videos tell no more of how videos differ than one clip of each."""
    rows = [
        {"item_id": f"{medium}-{clip:02d}", "medium": medium, "loss": loss}
        for medium, loss in (("x", 1.0), ("y", 3.0))
        for clip in range(3)
    ]
    assert summary_of(by_item(pd.DataFrame(rows))) == {"loss": 2.0, "standard_error": pytest.approx(1.0), "items": 6}
