"""Latents of a media set, which training on data reads instead of pixels. Loads the VAE alone."""

from collections.abc import Iterator

import pandas as pd
import torch
from torch import Tensor

from cosmos_rl_core.errors import ConfigError
from stages import contracts
from stages.artifacts.request import Request
from stages.context import Context
from stages.formats.prepared import ITEMS, LATENTS, write_shards
from stages.formats.tables import to_parquet
from stages.training.loading import load_media, load_model


def run(request: Request, context: Context) -> dict[str, int]:
    """Write ``latents/<n>.tar`` of ``<item id>.safetensors``, and ``index.parquet``, a row an item in the set's order.

    The latents are normalised and float32. Items are encoded one by one, so that their bits depend on no other item.
    """
    config = request.settings(contracts.Encode)
    # Every rank checks before any writes a shard: machines may hold different copies of the files.
    media = load_media(config.dataset, config.dataset_digest)
    model = load_model(config.model, ("vae",), context.ranks.device)
    index_of = {item_id: index for index, item_id in enumerate(media.item_ids)}
    expected = (config.media.frames, *config.media.size, 3)

    def encode(ids: list[str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
        for item_id in ids:
            pixels, _ = media.item(index_of[item_id])
            if pixels.shape != expected:
                found = f"item {item_id} of the dataset is {pixels.shape}"
                raise ConfigError(f"{found}, expected {expected}")
            latents = model.encode_media(torch.tensor(pixels, device="cpu")[None])[0]
            yield item_id, {"latents": latents.cpu()}

    layout = write_shards(context, LATENTS, list(media.item_ids), config.items_per_shard, encode)
    if context.ranks.rank == 0:
        prompt_ids = [media.prompt_of(index).id for index in range(len(media))]
        numbers = [number for number, ids in enumerate(layout) for _ in ids]
        table = pd.DataFrame({"item_id": media.item_ids, "prompt_id": prompt_ids, "shard": numbers})
        context.attempt.put(ITEMS, to_parquet(table))
    return {"items": len(media)}
