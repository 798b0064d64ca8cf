"""Observers of a run are asked before a wave and told after it, in their order; each may stop the run."""

import pytest

from cosmos_rl_core.errors import BudgetError
from flows.session.observers import Observer, observed


def test_observers_are_called_around_each_wave_in_their_order():
    said: list[str] = []

    def launch(name: str, *requests: object) -> list[object]:
        said.append(f"made {name} of {len(requests)}")
        return ["manifest"]

    first = Observer(before=lambda name, asked: said.append(f"first before {name}"))
    second = Observer(
        before=lambda name, asked: said.append(f"second before {name}"),
        after=lambda name, asked, made: said.append(f"second after {name}: {len(asked)}, {made}"),
    )
    assert observed(launch, [first, second])("rollout", "a", "b") == ["manifest"]  # pyright: ignore[reportArgumentType]
    assert said == [
        "first before rollout",
        "second before rollout",
        "made rollout of 2",
        "second after rollout: 2, ['manifest']",
    ]


def test_an_observer_keeps_a_wave_from_starting():
    def refuse(name: str, requests: object) -> None:
        raise BudgetError(f"no room for {name}")

    def launch(name: str, *requests: object) -> list[object]:
        raise AssertionError("it started")

    with pytest.raises(BudgetError, match="no room for update"):
        observed(launch, [Observer(before=refuse)])("update")  # pyright: ignore[reportArgumentType]
