"""The order in which supervised training takes items."""

import tracemalloc

import numpy as np
import pytest

from cosmos_rl_core import seeds
from cosmos_rl_core.errors import DatasetError
from stages.training.order import ItemOrder

SOURCE = np.array(["a", "b", "b", "a", "b"], dtype=object)
WEIGHTS = {"b": 1.0, "a": 0.5}


def test_draws_continue_one_sequence_whichever_step_is_asked_for():
    """The sequence is one generator's from its beginning, as in earlier versions."""
    size = 60_000
    draws = seeds.generator(7, "data sources").random(4 * size) * 1.5
    expected = np.where(draws < 0.5, "a", "b")
    order = ItemOrder(SOURCE, WEIGHTS, size, 7)
    for step in (2, 0, 3, 1):
        items = order.of_step(step)
        assert (SOURCE[[item for item, _ in items]] == expected[step * size : (step + 1) * size]).all()
        # A pass of a source ends after each of its items.
        for name, of_pass in (("a", 2), ("b", 3)):
            before = int((expected[: step * size] == name).sum())
            passes = [number for item, number in items if SOURCE[item] == name]
            assert passes == [(before + place) // of_pass for place in range(len(passes))]
    assert ItemOrder(SOURCE, WEIGHTS, size, 7).of_step(3) == order.of_step(3)


@pytest.mark.parametrize("weights", [{}, WEIGHTS])
def test_every_item_is_in_every_pass(weights: dict[str, float]):
    order = ItemOrder(SOURCE, weights, 6, 0)
    drawn = [one for step in range(50) for one in order.of_step(step)]
    assert len({*drawn}) == len(drawn) == 300
    assert {item for item, number in drawn if number == 3} == {*range(5)}


def test_a_step_takes_as_much_memory_as_the_steps_before_it():
    """Step 60,000 of 64 samples once drew the sources of 3.8 million samples."""
    order = ItemOrder(SOURCE, WEIGHTS, 64, 0)
    tracemalloc.start()
    order.of_step(60_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4_000_000


def test_the_order_of_a_pass_is_computed_once(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    permutation = seeds.permutation

    def counted(n: int, *key: seeds.Key) -> list[int]:
        asked.append(n)
        return permutation(n, *key)

    monkeypatch.setattr(seeds, "permutation", counted)
    order = ItemOrder(np.array(["a"] * 1000, dtype=object), {}, 10, 0)
    for step in range(150):
        order.of_step(step)
    assert asked == [1000, 1000]


def test_a_source_without_items_is_named():
    """Of a VLM's dataset, no conversation may be left: that is known only once all were read."""
    with pytest.raises(DatasetError, match=r"no item of c is left to train on"):
        ItemOrder(SOURCE, WEIGHTS | {"c": 1.0}, 4, 0)
