"""Forwards of one fixed size."""

import pytest

from cosmos_rl_core.rewards._batches import each, in_batches


def test_every_forward_has_the_same_size_and_results_keep_the_order():
    sizes: list[int] = []

    def double(items: list[int]) -> list[int]:
        sizes.append(len(items))
        return [2 * item for item in items]

    assert in_batches(range(7), 3, double) == [0, 2, 4, 6, 8, 10, 12]
    assert in_batches([5], 3, double) == [10]
    assert in_batches([], 3, double) == []
    assert sizes == [3] * 4


def test_items_of_unlike_shapes_never_share_a_forward():
    shared: list[set[int]] = []

    def lengths(texts: list[str]) -> list[int]:
        shared.append({*map(len, texts)})
        return [len(text) for text in texts]

    assert in_batches(["a", "bb", "c", "dd", "e"], 2, lengths, len) == [1, 2, 1, 2, 1]
    assert shared == [{1}, {1}, {2}]


def test_a_sample_that_cannot_be_prepared_keeps_its_place_and_its_reason():
    def inverse(items: list[float]) -> list[float]:
        return [1 / item for item in items]

    def positive(number: float) -> float:
        if number <= 0:
            raise ValueError(f"{number} is not above 0")
        return number

    first, reason, last = in_batches(each([2.0, -1.0, 4.0], positive), 2, inverse)
    assert (first, str(reason), last) == (0.5, "-1.0 is not above 0", 0.25)


def test_a_forward_that_drops_an_item_is_a_mistake():
    with pytest.raises(ValueError, match="1 values for 2 items"):
        in_batches([1, 2], 2, lambda items: items[:1])
