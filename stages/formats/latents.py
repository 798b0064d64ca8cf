"""Latents of a media set by item id: ``latents/<n>.tar`` of ``<item id>.safetensors``, and ``index.parquet``."""

from itertools import chain

import numpy as np
import pandas as pd
from torch import Tensor

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.weights.policy_weights import from_bytes
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Input
from stages.formats.members import KEPT_BYTES, Members
from stages.formats.tables import read_table

INDEX = "index.parquet"
"""A row an item: ``item_id``, ``prompt_id`` and the number of its ``shard``."""


def shard_name(number: int) -> str:
    """Return the name of a shard of latents."""
    return f"latents/{number:05d}.tar"


class Latents:
    """Float32 latents by item id, unbatched, on the CPU, each read on access.

    At most ``kept_bytes`` stay in memory. Raises :class:`ArtifactError` for an id that the set does not have.
    """

    index: pd.DataFrame
    """A row an item, in the set's order: ``item_id``, ``prompt_id`` and the number of its ``shard``."""

    def __init__(self, source: Input, kept_bytes: int = KEPT_BYTES) -> None:
        artifact = Artifact(source)
        self.index = read_table(artifact, INDEX)
        self._members = Members(artifact, kept_bytes)
        self._shard_of: dict[str, int] = dict(zip(self.index["item_id"], self.index["shard"], strict=True))
        items: dict[str, list[str]] = {}
        for item_id, prompt_id in zip(self.index["item_id"], self.index["prompt_id"], strict=True):
            items.setdefault(prompt_id, []).append(item_id)
        self._items = {prompt_id: [(item, prompt_id) for item in items[prompt_id]] for prompt_id in sorted(items)}
        self._all_items = list(chain.from_iterable(self._items.values()))

    @property
    def prompt_ids(self) -> list[str]:
        """Return the prompt ids of the items, sorted, each once."""
        return list(self._items)

    def choose(self, prompt_id: str, generator: np.random.Generator) -> tuple[str, str]:
        """Choose an item of the prompt, or any item if the prompt has none, and return it with its own prompt's id."""
        pool = self._items.get(prompt_id, self._all_items)
        return pool[int(generator.integers(len(pool)))]

    def __getitem__(self, item_id: str) -> Tensor:
        if item_id not in self._shard_of:
            raise ArtifactError(
                f"{self._members.artifact.url} has no latents of {item_id}; it has {len(self._shard_of)} items"
            )
        data = self._members.read(shard_name(self._shard_of[item_id]), f"{item_id}.safetensors")
        return from_bytes(data)["latents"]
