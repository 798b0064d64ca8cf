"""Latents of a media set, once: what training on data reads instead of pixels. Loads the VAE alone."""

from itertools import chain

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from cosmos_rl_core import shards
from cosmos_rl_core.datasets._base import Media
from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.models._base import Model
from cosmos_rl_core.policy_weights import from_bytes, to_bytes
from stages import contracts
from stages.artifacts import Artifact
from stages.context import Context
from stages.contracts import Input, MediaShape, Request
from stages.layouts import tar_of
from stages.loading import load_media, load_model
from stages.members import KEPT_BYTES, Members
from stages.samples import INDEX, cut, read_table, to_parquet


def run(request: Request, context: Context) -> dict[str, int]:
    """Write ``latents/<n>.tar`` of ``<item id>.safetensors`` and ``index.parquet``: every rank its shards, adopted
    where an earlier attempt made them.

    Items are encoded one by one, so that their bits depend on no other item.
    """
    config, ranks = request.config, context.ranks
    assert isinstance(config, contracts.Encode)
    # Every rank for itself, before any writes a shard: machines may hold other copies of the files.
    media = load_media(config.dataset, config.dataset_digest)
    layout: list[list[str]] = context.layout({"shards": cut(list(media.item_ids), config.items_per_shard)})["shards"]
    model = load_model(config.model, ("vae",), ranks.device)
    index_of = {item_id: index for index, item_id in enumerate(media.item_ids)}
    mine = range(ranks.rank, len(layout), ranks.world_size)
    total = sum(len(layout[number]) for number in mine)
    done = 0
    for number in mine:

        def make(number: int = number, done: int = done) -> dict[str, bytes]:
            members: dict[str, bytes] = {}
            for item_id in layout[number]:
                context.progress("encoding", done + len(members), total)
                latents = _latents(media, index_of[item_id], model, config.media)
                members[f"{item_id}.safetensors"] = to_bytes({"latents": latents})
            return {_name(number): shards.pack(members)}

        context.attempt.shard(number, make, check=tar_of(_name(number), layout[number]))
        done += len(layout[number])
        context.progress("encoding", done, total)
    if ranks.rank == 0:
        context.attempt.put(INDEX, to_parquet(_table(media, layout)))
    return {"items": len(media)}


def _latents(media: Media, index: int, model: Model, shape: MediaShape) -> Tensor:
    """Normalised float32 latents of one item, ``latent_shape``, on the CPU."""
    pixels, _ = media.item(index)
    if pixels.shape != (expected := (shape.frames, *shape.size, 3)):
        raise ConfigError(f"item {media.item_ids[index]} of the dataset is {pixels.shape}, expected {expected}")
    return model.encode_media(torch.tensor(pixels, device="cpu")[None])[0].cpu()


def _table(media: Media, layout: list[list[str]]) -> pd.DataFrame:
    """A row an item, in the set's order."""
    prompt_ids = [media.prompt_of(index).id for index in range(len(media))]
    numbers = [number for number, ids in enumerate(layout) for _ in ids]
    return pd.DataFrame({"item_id": media.item_ids, "prompt_id": prompt_ids, "shard": numbers})


def _name(number: int) -> str:
    return f"latents/{number:05d}.tar"


class Latents:
    """Float32 latents by item id, unbatched, on the CPU, each read when it is asked for.

    At most ``kept_bytes`` stay in memory. Asking for an id that the set does not have raises :class:`ArtifactError`.
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
        """The prompts of the items, sorted, each once."""
        return list(self._items)

    def choose(self, prompt_id: str, generator: np.random.Generator) -> tuple[str, str]:
        """The ids of an item of the prompt, or of any where it has none, and of that item's own prompt."""
        pool = self._items.get(prompt_id, self._all_items)
        return pool[int(generator.integers(len(pool)))]

    def __getitem__(self, item_id: str) -> Tensor:
        if item_id not in self._shard_of:
            raise ArtifactError(
                f"{self._members.artifact.url} has no latents of {item_id}; it has {len(self._shard_of)} items"
            )
        data = self._members.read(_name(self._shard_of[item_id]), f"{item_id}.safetensors")
        return from_bytes(data)["latents"]
