"""Shares of prompt sets in what an iteration draws."""

import math
from collections import Counter

import numpy as np
import pytest

from cosmos_rl_core import seeds
from cosmos_rl_core.datasets import _shares
from cosmos_rl_core.datasets._shares import Share, chosen, most

SETS = ((0.7, 40), (0.2, 13), (0.1, 7))
"""Weights and sizes."""


SHARES = [Share(weight=weight, num_prompts=size) for weight, size in SETS]


WANTED = 8


FIRSTS = np.cumsum([0, *(size for _, size in SETS)])


def set_of(index: int) -> int:
    return int(np.searchsorted(FIRSTS, index, side="right")) - 1


def counts(k: int, seed: int = 0) -> list[int]:
    """How many prompts iteration k takes of each set."""
    found = Counter(map(set_of, chosen(SHARES, WANTED, seed, k)))
    return [found[number] for number in range(len(SETS))]


def test_each_set_has_its_share_of_every_iteration_within_one_prompt_exact_on_average():
    drawn = np.array([counts(k) for k in range(400)])
    expected = WANTED * np.array([weight for weight, _ in SETS])
    assert (drawn.sum(1) == WANTED).all()
    assert (np.floor(expected) <= drawn).all()
    assert (drawn <= np.ceil(expected)).all()
    totals, means = drawn.sum(0), 400 * expected
    # The 5 % bound of chi-square with two degrees of freedom; independent draws would be about as far as that.
    assert ((totals - means) ** 2 / means).sum() < 5.99


def test_all_prompts_of_a_set_are_used_before_any_is_used_again():
    largest = most(SHARES, WANTED)
    assert largest == [math.ceil(WANTED * weight) for weight, _ in SETS] == [6, 2, 1]
    seen: list[set[int]] = [set() for _ in SETS]
    passes = [0] * len(SETS)
    for k in range(200):
        drawn = chosen(SHARES, WANTED, 0, k)
        assert len(set(drawn)) == WANTED
        for number, (_, size) in enumerate(SETS):
            now = {index for index in drawn if set_of(index) == number}
            if now & seen[number]:
                assert len(seen[number]) > size - largest[number]
                seen[number], passes[number] = set(), passes[number] + 1
            seen[number] |= now
    assert min(passes) >= 10


def test_draws_depend_on_seed_and_iteration_alone():
    one = [chosen(SHARES, WANTED, 0, k) for k in range(30)]
    assert one[::-1] == [chosen(SHARES, WANTED, 0, k) for k in reversed(range(30))]
    assert one != [chosen(SHARES, WANTED, 1, k) for k in range(30)]
    assert [counts(k) for k in range(30)] != [counts(k, seed=1) for k in range(30)]


def test_counts_are_exact_where_weights_have_no_binary_form():
    thirds = [Share(weight=0.1, num_prompts=4)] * 3
    assert most(thirds, 12) == [4, 4, 4]
    for k in range(50):
        assert sorted(chosen(thirds, 12, 0, k)) == [*range(12)]
    tiny = [Share(weight=1e-9, num_prompts=1), Share(weight=1e9, num_prompts=4)]
    assert sorted(chosen(tiny, 4, 0, 3)) == [1, 2, 3, 4]


def test_the_order_of_a_pass_is_drawn_once(monkeypatch: pytest.MonkeyPatch):
    drawn: list[int] = []
    permutation = seeds.permutation

    def counted(n: int, *key: seeds.Key) -> list[int]:
        drawn.append(n)
        return permutation(n, *key)

    monkeypatch.setattr(seeds, "permutation", counted)
    shares = [Share(weight=1, num_prompts=10_000), Share(weight=1, num_prompts=20_000)]
    found = [chosen(shares, WANTED, 77, k) for k in range(100)]
    assert drawn == [10_000, 20_000]
    _shares.order_of.cache_clear()
    assert [chosen(shares, WANTED, 77, k) for k in (99, 0)] == [found[99], found[0]]
