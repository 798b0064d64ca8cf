"""Costs as they are told."""

import pytest

from flows.ledger.costs import device_time


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0, "0 s"), (0.8, "0.8 s"), (58.06, "58.1 s"), (119.6, "120 s"), (148, "2.47 min"), (7199, "120 min"),
     (7300, "2.03 h"), (10**6, "278 h"), (10**8, "27,778 h")],
)  # fmt: skip
def test_device_time_has_a_unit_that_fits_its_size(seconds: float, words: str):
    assert device_time(seconds) == words
