"""Samples that a thread prepares while a model scores those before them."""

import threading

import numpy as np
import pytest

from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._batches.preparation import AHEAD, Prepared

PATIENCE_S = 60.0


def samples(*names: str) -> list[Sample]:
    return [Sample(name, "p", "x", np.zeros((1, 2, 2, 3), np.uint8)) for name in names]


class Preparing:
    """Prepares samples to their ids, and says which have begun and in which thread."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.threads: set[int] = set()
        self.another = threading.Condition()

    def __call__(self, sample: Sample) -> str:
        with self.another:
            self.begun.append(sample.sample_id)
            self.threads.add(threading.get_ident())
            self.another.notify_all()
        if sample.sample_id == "bad":
            raise ValueError("it cannot be shown")
        return f"made {sample.sample_id}"

    def wait_for(self, count: int) -> None:
        with self.another:
            assert self.another.wait_for(lambda: len(self.begun) >= count, PATIENCE_S)


def num_threads() -> int:
    return len([one for one in threading.enumerate() if one.name.startswith("prepare")])


def test_the_next_samples_are_prepared_while_one_is_scored_and_no_more_of_them():
    preparing, asked = Preparing(), samples("a", "b", "c", "d", "e")
    prepared = Prepared(preparing)

    def score(sample: Sample, made: str) -> str:
        place = asked.index(sample)
        preparing.wait_for(min(place + 1 + AHEAD, len(asked)))
        assert len(preparing.begun) <= place + 1 + AHEAD
        return f"{made}, scored"

    assert prepared.each(asked, score) == [f"made {one.sample_id}, scored" for one in asked]
    assert preparing.begun == ["a", "b", "c", "d", "e"]
    assert threading.get_ident() not in preparing.threads
    assert num_threads() == 0


def test_announced_samples_are_prepared_across_the_border_of_two_calls():
    preparing, first, second = Preparing(), samples("a", "b"), samples("c", "d")
    prepared = Prepared(preparing)
    prepared.expect(first)
    assert preparing.begun == []

    def score(sample: Sample, made: str) -> str:
        if sample is first[-1]:
            prepared.expect(second)
            preparing.wait_for(4)
        return made

    assert prepared.each(first, score) == ["made a", "made b"]
    assert preparing.begun == ["a", "b", "c", "d"]
    assert prepared.each(second, score) == ["made c", "made d"]
    assert preparing.begun == ["a", "b", "c", "d"]
    assert num_threads() == 0


@pytest.mark.parametrize("told", [True, False])
def test_an_error_is_of_its_sample_alone_and_what_is_tried_again_is_prepared_again(told: bool):
    preparing, asked, later = Preparing(), samples("a", "bad", "c"), samples("d")
    prepared = Prepared(preparing)
    if told:
        prepared.expect(asked)
        prepared.expect(later)
    found = prepared.each(asked, lambda _, made: made)
    assert [found[0], str(found[1]), found[2]] == ["made a", "it cannot be shown", "made c"]
    again = prepared.each(asked[1:], lambda _, made: made)
    assert [str(again[0]), again[1]] == ["it cannot be shown", "made c"]
    assert prepared.each(later, lambda _, made: made) == ["made d"]
    assert sorted(preparing.begun) == ["a", "bad", "bad", "c", "c", "d"]
    assert num_threads() == 0


def test_an_error_of_the_model_ends_the_call_and_the_thread():
    prepared = Prepared(Preparing())

    def score(sample: Sample, made: str) -> str:
        raise RuntimeError("the model is broken")

    with pytest.raises(RuntimeError, match="broken"):
        prepared.each(samples("a", "b", "c"), score)
    assert num_threads() == 0
