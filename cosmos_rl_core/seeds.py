"""Random access randomness: every draw is a function of a key, so no generator has to live, travel or be saved.

A key is a tuple of plain values, e.g. ``(run_seed, iteration, prompt_id, member)``. Draws come from numpy's Philox on
the CPU, so they are the same on every device, rank, batch and shard.
"""

import hashlib

import numpy as np

from cosmos_rl_core.canonical import canonical_json

Key = int | str


def derive(*key: Key) -> int:
    """Hash a key to a seed in [0, 2**63): sha256 of its canonical JSON, so ``1`` and ``"1"`` differ."""
    return int.from_bytes(hashlib.sha256(canonical_json(list(key))).digest()[:8], "big") >> 1


def sample_seed(run_seed: int, iteration: int, prompt_id: str, member: int) -> int:
    """The seed of one rollout sample; independent of rank, world size, batch and shard."""
    return derive(run_seed, iteration, prompt_id, member)


def generator(*key: Key) -> np.random.Generator:
    """A fresh Philox generator for a key. Use it for one draw or one item, never across steps."""
    return np.random.Generator(np.random.Philox(key=derive(*key)))


def normal(shape: tuple[int, ...], *key: Key) -> np.ndarray:
    """Standard normal float32 array of ``shape``, a function of the key alone."""
    return generator(*key).standard_normal(shape, dtype=np.float32)


def permutation(n: int, *key: Key) -> list[int]:
    """A permutation of ``range(n)``, a function of the key alone."""
    return generator(*key).permutation(n).tolist()
