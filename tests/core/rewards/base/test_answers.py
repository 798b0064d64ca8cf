"""Answers of scorers: what of them are scores, and the names under which scorers are offered."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards._base import Sample, answers
from cosmos_rl_core.rewards._base.names import plugin_of
from cosmos_rl_core.rewards._base.pixels import frames_of


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2, 2.0),
        (np.float32(0.5), 0.5),
        (Fraction(1, 4), 0.25),
        *((value, None) for value in (math.nan, math.inf, 10**400, True, "1", None)),
    ],
)
def test_finite_numbers_of_any_kind_are_scores(value: Any, expected: float | None):
    assert answers.finite(value) == expected


def test_an_entry_has_a_finite_score_and_other_values_as_they_can_be_kept():
    entry = {"r": np.float64(0.5), "count": 3, "lost": math.nan, "right": True, "said": "a\n  b", 7: None}
    kept = {"r": 0.5, "count": 3.0, "lost": None, "right": True, "said": "a b", "7": None}
    assert answers.scored(entry, "r") == kept
    for wrong, said in (
        ({"r": math.nan}, "the score 'r' is nan (float), expected a finite number"),
        ({"s": 1.0}, "no score named 'r' among ['s']"),
        ([0.5], "the reward returned [0.5] (list) for a sample, expected its scores by name or an exception"),
    ):
        found = answers.scored(wrong, "r")
        assert isinstance(found, Exception)
        assert said in str(found)
    failed = ValueError("no face")
    assert answers.scored(failed, "r") is failed


def test_an_answer_has_an_entry_for_each_sample():
    assert answers.entries(({"r": 1},), 1) == [{"r": 1}]
    with pytest.raises(TypeError, match="1 entries for 2 samples"):
        answers.entries([{}], 2)
    with pytest.raises(TypeError, match=r"returned None, expected a list"):
        answers.entries(None, 1)


def test_a_long_value_is_told_by_its_beginning_and_on_one_line():
    assert answers.brief("a\n b\ud800") == "a b\\ud800"
    assert answers.brief("x" * 400) == "x" * answers.LONGEST + "..."


def test_a_scorer_is_found_by_its_other_names():
    assert plugin_of("jpeg") == "jpeg"
    with pytest.raises(ConfigError, match="unknown reward 'jpg'; did you mean 'jpeg'"):
        plugin_of("jpg")


@pytest.mark.parametrize(
    "pixels", [np.zeros((1, 4, 4, 3)), np.zeros((4, 4, 3), np.uint8), np.zeros((0, 4, 4, 3), np.uint8)]
)
def test_pixels_that_are_no_pictures_are_an_error(pixels: np.ndarray):
    with pytest.raises(ValueError, match=r"expected uint8 pixels \[frames, height, width, 3\], got"):
        frames_of(Sample("s", "p", "x", pixels))
