"""Pictures that prompts refer to, read from the pool of a store by the digests of their files."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.datasets._references import decoded
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import store
from stages.artifacts.pool import PICTURES
from stages.artifacts.records import store_of

HELD = 16
"""Decoded pictures in memory: samples of a prompt have the same."""


class Pictures:
    """References of the store that a slot is in."""

    def __init__(self, slot: str) -> None:
        self._root = store.join(store_of(slot), "dataset", PICTURES)
        self._decoded = lru_cache(HELD)(self._read)

    def of(self, digests: Sequence[str]) -> tuple[np.ndarray, ...]:
        """Return pictures, uint8 RGB ``[1, height, width, 3]`` each.

        Raises :class:`ArtifactError` for one that is missing or damaged.
        """
        return tuple(self._decoded(one) for one in digests)

    def data(self, digest: str) -> bytes:
        """Return the bytes of a picture's file. Raises :class:`ArtifactError` if it is missing or damaged."""
        data = store.read_if_exists(url := store.join(self._root, digest))
        if data is None or sha256(data) != digest:
            state = "missing" if data is None else "damaged"
            raise ArtifactError(f"{url} is {state}; restore it, or remove it and make the stage 'references' again")
        return data

    def _read(self, digest: str) -> np.ndarray:
        return decoded(self.data(digest))
