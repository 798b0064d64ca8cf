"""Prepared data by id: embeddings of prompts and latents of media items.

They are ``<id>.safetensors`` in ``<folder>/<n>.tar``, with an index of the shards.
"""

from collections.abc import Callable, Iterable

import numpy as np
import pandas as pd
from safetensors.torch import load as load_tensors
from torch import Tensor

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.models._base import Conditioning
from cosmos_rl_core.storage import shards
from cosmos_rl_core.weights.policy_weights import to_bytes
from stages.artifacts.artifact import Artifact
from stages.artifacts.layouts import cut, holds
from stages.artifacts.request import Input
from stages.context import Context
from stages.formats.members import KEPT_BYTES, Members
from stages.formats.tables import read_table

EMBEDDINGS, LATENTS = "embeddings", "latents"
"""The folders of shards."""
PROMPTS = "index.json"
"""The number of the shard of each prompt id."""
ITEMS = "index.parquet"
"""A row an item of a media set: ``item_id``, ``prompt_id`` and the number of its ``shard``."""
NEGATIVE = "_negative"
"""The id of the negative prompt, for guidance. No prompt id begins with an underscore."""
EMPTY = "_empty"
"""The id of the empty prompt, for text dropout. Stored only if the negative prompt is not empty."""


def write_shards(
    context: Context,
    folder: str,
    ids: list[str],
    per_shard: int,
    encode: Callable[[list[str]], Iterable[tuple[str, dict[str, Tensor]]]],
) -> list[list[str]]:
    """Write the shards of all ids, and return the ids of each. ``encode`` gives the tensors of each id of a shard.

    Every rank makes its own shards and adopts those that an earlier attempt finished.
    """
    ranks = context.ranks
    layout: list[list[str]] = context.layout({"shards": cut(ids, per_shard)})["shards"]
    mine = range(ranks.rank, len(layout), ranks.world_size)
    done, total = 0, sum(len(layout[number]) for number in mine)
    for number in mine:
        name = _shard_name(folder, number)
        check = holds([name], layout[number])
        context.progress(f"making {folder}", done, total)
        if not context.attempt.adopt(number, check):
            members: dict[str, bytes] = {}
            for one, tensors in encode(layout[number]):
                members[f"{one}.safetensors"] = to_bytes(tensors)
                context.progress(f"making {folder}", done + len(members), total)
            context.attempt.finish(number, {name: shards.pack(members)}, check)
        done += len(layout[number])
    return layout


def _shard_name(folder: str, number: int) -> str:
    return f"{folder}/{number:05d}.tar"


class _Shards:
    """Tensors by id, on the CPU, each read on access. At most ``kept_bytes`` stay in memory."""

    def __init__(self, artifact: Artifact, folder: str, shard_of: dict[str, int], kept_bytes: int) -> None:
        self._members = Members(artifact, kept_bytes)
        self._folder, self._shard_of = folder, shard_of

    def _read(self, one: str) -> dict[str, Tensor]:
        shard = _shard_name(self._folder, self._shard_of[one])
        return load_tensors(self._members.read(shard, f"{one}.safetensors"))


class Embeddings(_Shards):
    """Conditioning by prompt id, unbatched. Raises :class:`ArtifactError` at once if one of ``prompt_ids`` was not
    embedded.
    """

    def __init__(self, source: Input, prompt_ids: list[str], kept_bytes: int = KEPT_BYTES) -> None:
        artifact = Artifact(source)
        shard_of: dict[str, int] = artifact.json(PROMPTS)
        self._empty = EMPTY if EMPTY in shard_of else NEGATIVE
        if missing := sorted({*prompt_ids} - {EMPTY} - {*shard_of}):
            raise ArtifactError(
                f"{artifact.url} has no embedding of {', '.join(missing[:5])}; embed the prompts of this plan"
            )
        super().__init__(artifact, EMBEDDINGS, shard_of, kept_bytes)

    def __getitem__(self, prompt_id: str) -> Conditioning:
        return self._read(self._empty if prompt_id == EMPTY else prompt_id)


class Latents(_Shards):
    """Float32 latents of a media set by item id, unbatched."""

    index: pd.DataFrame
    """A row an item, in the set's order: ``item_id``, ``prompt_id`` and the number of its ``shard``."""

    def __init__(self, source: Input, kept_bytes: int = KEPT_BYTES) -> None:
        artifact = Artifact(source)
        self.index = read_table(artifact, ITEMS)
        shard_of = self.index.set_index("item_id")["shard"].to_dict()
        super().__init__(artifact, LATENTS, shard_of, kept_bytes)
        by_prompt = self.index.groupby("prompt_id")["item_id"]
        self._items = {str(p): [(item, str(p)) for item in items] for p, items in by_prompt}
        self._all_items = [item for items in self._items.values() for item in items]

    @property
    def prompt_ids(self) -> list[str]:
        """Return the prompt ids of the items, sorted, each once."""
        return list(self._items)

    def choose(self, prompt_id: str, generator: np.random.Generator) -> tuple[str, str]:
        """Choose an item of the prompt, or any item if the prompt has none, and return it with its own prompt's id."""
        pool = self._items.get(prompt_id, self._all_items)
        return pool[int(generator.integers(len(pool)))]

    def __getitem__(self, item_id: str) -> Tensor:
        return self._read(item_id)["latents"]
