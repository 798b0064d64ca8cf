"""Latents of media, which training reads instead of pixels. Only the VAE is loaded."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Protocol

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from cosmos_rl_core.datasets._base import ItemError
from cosmos_rl_core.datasets._windows import Windows
from cosmos_rl_core.errors import ConfigError, DatasetError, listed
from cosmos_rl_core.models._base import Model
from cosmos_rl_core.parallel.distributed import Group
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.execution.context import Context
from stages.formats.latents import DEVIATION, ITEMS, MODE, write_shards
from stages.formats.part_media import PartMedia
from stages.formats.parts import Parts
from stages.formats.tables import to_parquet
from stages.training.loading import load_media, load_model

MAX_THREADS = 8
"""Most files that a rank checks at once."""


def run(request: Request, context: Context[Group]) -> dict[str, int]:
    """Write ``latents/<n>.tar`` of ``<latents id>.safetensors``, and ``index.parquet``: one row per file, in order.

    The latents are normalised and float32. Media are encoded one by one, so that the bits of one depend on no other.
    """
    config = request.settings(contracts.Encode)
    media = _media(request, config, context.ranks)
    if context.handed is None:
        media.check(context, media.ids)

    @cache
    def vae() -> Model:
        return load_model(config.model, ("vae",), context.ranks.device)

    def encode(ids: list[str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
        if context.handed is not None:
            # A worker checks only the media that it gets.
            media.check(context, ids)
        model = vae()
        for one, pixels in media.pixels(ids):
            batch = torch.tensor(pixels, device="cpu")[None]
            if config.deviations:
                mode, deviation = model.encode_posterior(batch)
                yield one, {MODE: mode[0].cpu(), DEVIATION: deviation[0].cpu()}
            else:
                yield one, {MODE: model.encode_media(batch)[0].cpu()}

    layout = write_shards(context, media.ids, config.items_per_shard, encode)
    if context.ranks.rank == 0:
        context.attempt.put(ITEMS, to_parquet(media.table(layout)))
    return {"items": len(media.ids)}


class _Clips(Protocol):
    """Media by the ids of their latents."""

    @property
    def ids(self) -> list[str]: ...

    def check(self, context: Context[Group], ids: Sequence[str]) -> None: ...

    def pixels(self, ids: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]: ...

    def table(self, layout: Sequence[Sequence[str]]) -> pd.DataFrame: ...


def _media(request: Request, config: contracts.Encode, ranks: Group) -> _Clips:
    """Return the media to encode: the media of the last part, or a whole media set."""
    if not request.inputs.get("parts"):
        return _MediaSet(config, ranks)
    windows = Windows(config.media.frames, config.windows, config.fps)
    later = [Artifact(source) for source in request.inputs.get("later", ())]
    return PartMedia(Parts.of(request), config.sources, windows, config.buckets or (config.media.size,), later)


_UNUSABLE = (
    "cannot be used; mend or remove it and its caption, and plan another run (--run-id), because this one is pinned to "
    "the files as they are"
)


class _MediaSet:
    """The items of a media set, under their own ids."""

    def __init__(self, config: contracts.Encode, ranks: Group) -> None:
        assert config.dataset is not None
        self._name = config.dataset.name
        # Before any rank writes a shard: machines may hold different copies of the files.
        self._media = load_media(config.dataset, config.dataset_digest, ranks)
        self._expected = (config.media.frames, *config.media.size, 3)
        self._index_of = {item_id: index for index, item_id in enumerate(self._media.item_ids)}

    @property
    def ids(self) -> list[str]:
        return list(self._media.item_ids)

    def check(self, context: Context[Group], ids: Sequence[str]) -> None:
        """Raise :class:`DatasetError` if one of these files cannot be used; the error lists all such files of the set.

        Each rank checks a share. Collective.
        """
        faults = self._faults(context, ids)
        if faults and len(ids) < len(self.ids):
            faults = self._faults(context, self.ids)
        if faults:
            raise DatasetError(listed(f"{len(faults)} media of the dataset {self._name!r} {_UNUSABLE}:", faults))

    def _faults(self, context: Context[Group], ids: Sequence[str]) -> list[str]:
        ranks = context.ranks
        mine = [self._index_of[one] for one in ids[ranks.rank :: ranks.world_size]]
        found: list[str] = []
        # Decoding releases the interpreter lock.
        with ThreadPoolExecutor(MAX_THREADS) as pool:
            for done, fault in enumerate(pool.map(self._media.fault, mine), 1):
                found += [fault] if fault else []
                context.progress("checking media", done, len(mine))
        return sorted(fault for each in ranks.gather(found) for fault in each)

    def pixels(self, ids: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        for item_id in ids:
            try:
                pixels = self._media.item(self._index_of[item_id])[0]
            except ItemError as error:
                message = listed(f"a medium of the dataset {self._name!r} {_UNUSABLE}:", [str(error)])
                raise DatasetError(message) from error
            if pixels.shape != self._expected:
                found = f"item {item_id} of the dataset {self._name!r} has pixels of shape {pixels.shape}"
                raise ConfigError(f"{found}, expected {self._expected}; mend the dataset's plugin")
            yield item_id, pixels

    def table(self, layout: Sequence[Sequence[str]]) -> pd.DataFrame:
        prompt_ids = [self._media.prompt_of(index).id for index in range(len(self._media))]
        numbers = [number for number, ids in enumerate(layout) for _ in ids]
        item_ids = self._media.item_ids
        return pd.DataFrame({"latents_id": item_ids, "item_id": item_ids, "prompt_id": prompt_ids, "shard": numbers})
