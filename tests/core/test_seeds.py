"""Draws by keys: known numbers, and that nothing but the key decides them."""

import hashlib

import numpy as np

from cosmos_rl_core import seeds


def test_a_seed_is_the_beginning_of_the_digest_of_its_key():
    expected = int.from_bytes(hashlib.sha256(b'["a",1]').digest()[:8], "big") // 2
    assert seeds.derive("a", 1) == expected < 2**63
    assert seeds.derive("a", "1") != expected
    assert seeds.sample_seed(0, 1, "p", 2) == seeds.derive(0, 1, "p", 2)


def test_draws_are_philox_of_the_key_whatever_was_drawn_before():
    drawn = seeds.normal((2, 3), "noise", 7)
    seeds.normal((5,), "noise", 8)
    stock = np.random.Generator(np.random.Philox(key=seeds.derive("noise", 7)))
    np.testing.assert_array_equal(drawn, stock.standard_normal((2, 3), dtype=np.float32))
    np.testing.assert_array_equal(drawn, seeds.normal((2, 3), "noise", 7))
    assert not np.array_equal(drawn, seeds.normal((2, 3), "noise", 8))


def test_a_permutation_has_each_number_once():
    order = seeds.permutation(50, "order", 0)
    assert sorted(order) == [*range(50)] != order
    assert order == seeds.permutation(50, "order", 0) != seeds.permutation(50, "order", 1)
