"""Latents of media by id: ``<id>.safetensors`` in ``latents/<n>.tar``, with an index of the shards."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import numpy as np
import pandas as pd
from safetensors.torch import load as load_tensors
from torch import Tensor

from cosmos_rl_core.config.policy import Posterior
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.pipelines.buckets import Size
from cosmos_rl_core.storage import shards
from cosmos_rl_core.training.noise_levels import DrawKey, posterior_noise
from cosmos_rl_core.weights.policy_weights import to_bytes
from stages.artifacts.artifact import Artifact
from stages.artifacts.layouts import cut, holds
from stages.artifacts.request import Input, Request
from stages.contracts import OnPolicy, Split, Training
from stages.execution.context import Context, Ranks
from stages.formats.members import KEPT_BYTES, Members
from stages.formats.parts import Parts, side_of
from stages.formats.tables import read_table

LATENTS = "latents"
"""The folder of shards."""
MODE, DEVIATION = "latents", "deviation"
"""Names of tensors: the mode of an item's posterior and, if training draws from it, its standard deviation."""
ITEMS = "index.parquet"
"""Name of the table with one row per set of latents: its ``latents_id`` and the number of its ``shard``.

A media set also has ``item_id`` and ``prompt_id``. A part of a dataset also has the digest of the ``medium``, and
:data:`SIZE` if it has several sizes.
"""
SIZE = ("height", "width")
"""Columns with the size in pixels that a medium was cut to."""


def write_shards(
    context: Context[Ranks],
    ids: list[str],
    per_shard: int,
    encode: Callable[[list[str]], Iterable[tuple[str, dict[str, Tensor]]]],
) -> list[list[str]]:
    """Write the shards of all ids, and return the ids of each shard. Collective.

    ``encode`` takes the ids of a shard and yields each with its tensors. Every rank makes its own shards, and adopts
    shards that an earlier attempt finished.
    """
    layout: list[list[str]] = context.layout({"shards": cut(ids, per_shard)})["shards"]
    done, total = 0, sum(len(layout[number]) for number in context.own(len(layout)))
    for number in context.units(len(layout)):
        name = _shard_name(number)
        check = holds([name], layout[number])
        context.progress("making latents", done, total)
        if not context.attempt.adopt(number, check):
            members: dict[str, bytes] = {}
            for one, tensors in encode(layout[number]):
                members[f"{one}.safetensors"] = to_bytes(tensors)
                context.progress("making latents", done + len(members), total)
            context.attempt.finish(number, {name: shards.pack(members)}, check)
        done += len(layout[number])
    return layout


def _shard_name(number: int) -> str:
    return f"{LATENTS}/{number:05d}.tar"


class Latents:
    """Float32 latents of a media set, or of the parts of a dataset, by item id, unbatched, on the CPU.

    Each is read on access. At most ``kept_bytes`` stay in memory.
    """

    parts: Parts | None
    """The parts of the dataset, which list its items; None for a media set."""
    index: pd.DataFrame
    """One row per item, in the set's order: ``item_id``, ``prompt_id``, ``latents_id`` (the id of its latents),
    ``source`` (a name, "" for a media set) and ``medium``; several items may be clips of one medium."""

    def __init__(
        self,
        sources: Sequence[Input],
        parts: Parts | None = None,
        split: Split | None = None,
        kept_bytes: int = KEPT_BYTES,
        posterior: Posterior = "mode",
    ) -> None:
        self.parts, self._posterior = parts, posterior
        artifacts = [Artifact(source) for source in sources]
        tables = [read_table(artifact, ITEMS) for artifact in artifacts]
        self._places: dict[str, tuple[Members, int]] = {}
        for artifact, table in zip(artifacts, tables, strict=True):
            members = Members(artifact, kept_bytes // len(artifacts))
            shards_of = zip(table["latents_id"], table["shard"], strict=True)
            self._places |= {one: (members, shard) for one, shard in shards_of} | self._places
        encoded: Any = pd.concat(tables, ignore_index=True)
        items = _items_of_set(encoded, artifacts[0]) if parts is None else _items_of(parts, encoded, split)
        self.index = items[["item_id", "prompt_id", "latents_id", "source", "medium"]]
        places = zip(*(items[name].astype(int) for name in SIZE), strict=True) if {*SIZE} <= {*items} else ()
        self._sizes: dict[str, Size] = dict(zip(items["item_id"], places, strict=False))
        self._latents_ids = dict(zip(self.index["item_id"], self.index["latents_id"], strict=True))
        by_prompt = self.index.groupby("prompt_id")["item_id"]
        self._items = {str(p): [(item, str(p)) for item in items] for p, items in by_prompt}
        self._all_items = [item for items in self._items.values() for item in items]

    @classmethod
    def of(cls, request: Request) -> Self:
        """Return the latents that a Request names."""
        config = request.config
        assert isinstance(config, OnPolicy)
        parts = Parts.of(request) if request.inputs.get("parts") else None
        posterior = config.posterior if isinstance(config, Training) else "mode"
        return cls(request.inputs["data"], parts, config.data_split, posterior=posterior)

    @property
    def prompt_ids(self) -> list[str]:
        """Return the prompt ids of the items, sorted, each once."""
        return list(self._items)

    def choose(self, prompt_id: str, generator: np.random.Generator) -> tuple[str, str]:
        """Choose an item of the prompt, or any item if it has none; return the item's id and its own prompt's id."""
        pool = self._items.get(prompt_id, self._all_items)
        return pool[int(generator.integers(len(pool)))]

    def size(self, item_id: str) -> Size | None:
        """Return height and width in pixels of an item; None if all items have one size."""
        return self._sizes.get(item_id)

    def __getitem__(self, item_id: str) -> Tensor:
        """Return the mode of an item's posterior, float32 ``[C, H, W]`` or ``[C, T, H, W]``."""
        return self._read(item_id)[MODE]

    def trained(self, item_id: str, key: DrawKey) -> Tensor:
        """Return the latents that a sample is trained on: the mode of the posterior, or a draw from it by the key."""
        if self._posterior == "mode":
            return self[item_id]
        stored = self._read(item_id)
        return stored[MODE] + stored[DEVIATION] * posterior_noise(tuple(stored[MODE].shape), key)

    def _read(self, item_id: str) -> dict[str, Tensor]:
        one = self._latents_ids[item_id]
        members, shard = self._places[one]
        return load_tensors(members.read(_shard_name(shard), f"{one}.safetensors"))


def _items_of_set(encoded: Any, artifact: Artifact) -> Any:
    """Return the items of a media set with their media. The id of a clip is the id of its medium and a number."""
    clips = (artifact.manifest.config.get("dataset") or {}).get("clips", 1)
    media = encoded["item_id"].str.rsplit("-", n=1).str[0] if clips > 1 else encoded["item_id"]
    return encoded.assign(source="", medium=media)


def _items_of(parts: Parts, encoded: Any, split: Split | None) -> Any:
    """Return one row per item and clip, sorted by item. Raises :class:`ArtifactError` on missing latents."""
    items = side_of(parts.items, split)
    if missing := sorted({*items["medium"]} - {*encoded["medium"]}):
        raise ArtifactError(f"{len(missing)} media have no latents, e.g. {missing[0]}; encode the parts of this plan")
    items = items.assign(source=items["unit"].str.partition("/")[0])
    both = (
        items[["item", "medium", "prompt_id", "source"]].merge(encoded, on="medium").sort_values(["item", "latents_id"])
    )
    clip = both.groupby("item").cumcount()
    several = clip.groupby(both["item"]).transform("max") > 0
    numbered = both["item"] + "-" + clip.map("{:02d}".format)
    return both.assign(item_id=both["item"].where(~several, numbered)).reset_index(drop=True)
