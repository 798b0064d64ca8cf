"""Samples and noise levels that fill a forward pass."""

import pytest

from cosmos_rl_core import plugins
from cosmos_rl_core.algorithms import dpo, nft
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.training.forwards import Filling, filling

TOKENS = 32
"""Tokens of a picture of 32 x 64 pixels in the tiny SD3."""


def options(tokens: int | None, mini_batch: int = 4) -> nft.Options:
    dataset = DatasetOptions(name="none")
    return nft.Options(type="nft", dataset=dataset, mini_batch=mini_batch, tokens_per_forward=tokens)


@pytest.mark.parametrize(
    ("tokens", "num_times", "expected"),
    [
        (None, 9, Filling(4, 1)),
        (10 * TOKENS, 3, Filling(3, 3)),
        (10 * TOKENS, 10, Filling(1, 10)),
        (11 * TOKENS - 1, 20, Filling(1, 10)),
        (TOKENS, 3, Filling(1, 1)),
        (1, 3, Filling(1, 1)),
    ],
)
def test_all_levels_of_a_sample_come_before_the_next_sample(tokens: int | None, num_times: int, expected: Filling):
    assert filling(options(tokens), num_times, lambda: TOKENS) == expected


@pytest.mark.parametrize(("halvings", "expected"), [*enumerate([(3, 3), (1, 3), (1, 2), (1, 1), (1, 1)])])
def test_each_lack_of_memory_halves_the_rows_of_a_forward_pass(halvings: int, expected: tuple[int, int]):
    def shrunk(size: int) -> int:
        return max(1, size >> halvings)

    assert filling(options(10 * TOKENS), 3, lambda: TOKENS, shrunk) == expected
    assert filling(options(None), 3, lambda: TOKENS, shrunk) == (shrunk(4), 1)


def test_a_number_of_samples_has_no_effect_with_a_number_of_tokens():
    assert [*options(80).without_effect()] == [
        "mini_batch without effect: tokens_per_forward decides what a forward pass holds"
    ]
    grpo = plugins.load("algorithms", "grpo").Options(
        type="grpo", dataset=DatasetOptions(name="none"), mini_batch=2, tokens_per_forward=8
    )
    assert len([*grpo.without_effect()]) == 1


@pytest.mark.parametrize(
    ("mini_batch", "tokens", "halvings", "expected"),
    [
        (4, None, 0, Filling(4)),
        (4, None, 1, Filling(2)),
        (4, None, 5, Filling(2)),
        (6, None, 1, Filling(2)),
        (2, 13 * TOKENS, 0, Filling(4, 3)),
        (2, 13 * TOKENS, 1, Filling(2, 3)),
        (2, 13 * TOKENS, 2, Filling(2, 1)),
        (2, 5 * TOKENS, 0, Filling(2, 2)),
        (2, TOKENS, 3, Filling(2, 1)),
    ],
)
def test_a_forward_pass_has_at_least_one_pair(mini_batch: int, tokens: int | None, halvings: int, expected: Filling):
    dataset = DatasetOptions(name="none")
    options = dpo.Options(type="dpo", dataset=dataset, mini_batch=mini_batch, tokens_per_forward=tokens)
    assert filling(options, 3, lambda: TOKENS, lambda size: max(1, size >> halvings), members=2) == expected
