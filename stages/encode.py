"""Latents of a media set, which training on data reads instead of pixels. Loads the VAE alone."""

import pandas as pd
import torch
from torch import Tensor

from cosmos_rl_core.datasets._base import Media
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models._base import Model
from cosmos_rl_core.storage import shards
from cosmos_rl_core.weights.policy_weights import to_bytes
from stages import contracts
from stages.artifacts.layouts import cut, tar_of
from stages.artifacts.request import Request
from stages.context import Context
from stages.contracts import MediaShape
from stages.formats.latents import INDEX, shard_name
from stages.formats.tables import to_parquet
from stages.training.loading import load_media, load_model


def run(request: Request, context: Context) -> dict[str, int]:
    """Write ``latents/<n>.tar`` of ``<item id>.safetensors``, and ``index.parquet``.

    Every rank makes its own shards and adopts those that an earlier attempt finished. Items are encoded one by one, so
    that their bits depend on no other item.
    """
    config, ranks = request.config, context.ranks
    assert isinstance(config, contracts.Encode)
    # Every rank checks before any writes a shard: machines may hold different copies of the files.
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
            return {shard_name(number): shards.pack(members)}

        context.attempt.shard(number, make, check=tar_of(shard_name(number), layout[number]))
        done += len(layout[number])
        context.progress("encoding", done, total)
    if ranks.rank == 0:
        context.attempt.put(INDEX, to_parquet(_table(media, layout)))
    return {"items": len(media)}


def _latents(media: Media, index: int, model: Model, shape: MediaShape) -> Tensor:
    """Return the normalised float32 latents of one item, ``latent_shape``, on the CPU."""
    pixels, _ = media.item(index)
    if pixels.shape != (expected := (shape.frames, *shape.size, 3)):
        raise ConfigError(f"item {media.item_ids[index]} of the dataset is {pixels.shape}, expected {expected}")
    return model.encode_media(torch.tensor(pixels, device="cpu")[None])[0].cpu()


def _table(media: Media, layout: list[list[str]]) -> pd.DataFrame:
    """Return a row an item, in the set's order."""
    prompt_ids = [media.prompt_of(index).id for index in range(len(media))]
    numbers = [number for number, ids in enumerate(layout) for _ in ids]
    return pd.DataFrame({"item_id": media.item_ids, "prompt_id": prompt_ids, "shard": numbers})
