"""Random numbers by key: every draw is a function of its key, so no random generator is kept or saved.

A key is a tuple of plain values, e.g. ``(run_seed, iteration, prompt_id, member)``. Draws come from numpy's Philox on
the CPU, so they are equal on every device and rank, in every batch and shard.
"""

import hashlib

import numpy as np

from cosmos_rl_core.canonical import canonical_json

Key = int | str


def derive(*key: Key) -> int:
    """Hash a key to a seed in [0, 2**63) by sha256 of its canonical JSON; ``1`` and ``"1"`` give different seeds."""
    return int.from_bytes(hashlib.sha256(canonical_json(list(key))).digest()[:8], "big") >> 1


def sample_seed(run_seed: int, iteration: int, prompt_id: str, member: int) -> int:
    """Return the seed of one rollout sample, independent of rank, world size, batch and shard."""
    return derive(run_seed, iteration, prompt_id, member)


def generator(*key: Key) -> np.random.Generator:
    """Return a new Philox generator for a key. Use it for one draw or one item, never across steps."""
    return np.random.Generator(np.random.Philox(key=derive(*key)))


def normal(shape: tuple[int, ...], *key: Key) -> np.ndarray:
    """Draw a standard normal float32 array of ``shape``; the key alone decides it."""
    return generator(*key).standard_normal(shape, dtype=np.float32)


def permutation(n: int, *key: Key) -> list[int]:
    """Draw a permutation of ``range(n)``; the key alone decides it."""
    return generator(*key).permutation(n).tolist()
