"""Sweeps: every combination of values of a few settings."""

import pytest

from cosmos_rl_core.errors import ConfigError
from flows.studying.sweeps import combinations, label


@pytest.mark.parametrize(
    ("sweeps", "expected"),
    [
        ((), [()]),
        (("a.b=1,2",), [("a.b=1",), ("a.b=2",)]),
        (("a=1,2", "b=x,y"), [("a=1", "b=x"), ("a=1", "b=y"), ("a=2", "b=x"), ("a=2", "b=y")]),
        (("a=[1, 2],[3]",), [("a=[1, 2]",), ("a=[3]",)]),
        (('a="x,y",z',), [('a="x,y"',), ("a=z",)]),
        (("a={ b = 1, c = 2 },1",), [("a={ b = 1, c = 2 }",), ("a=1",)]),
        (("a=1,1,2",), [("a=1",), ("a=2",)]),
    ],
)
def test_every_combination_is_one_setting(sweeps: tuple[str, ...], expected: list[tuple[str, ...]]) -> None:
    assert combinations(sweeps) == expected


@pytest.mark.parametrize("wrong", ["a", "=1", "a=", "a=1,", "a=,2"])
def test_a_sweep_without_a_key_or_a_value_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"expected section.key=value,value"):
        combinations([wrong])


def test_a_key_that_is_swept_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.optm_lr is swept twice"):
        combinations(["train.optm_lr=1", "train.optm_lr=2"])


def test_labels_leave_out_the_sections() -> None:
    assert label(["train.optm_lr=1e-4", "rollout.n_generation=4"]) == "optm_lr=1e-4, n_generation=4"
    assert label([]) == "as it is"
