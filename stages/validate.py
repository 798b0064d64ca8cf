"""Diffusion loss of a policy on held-out media, at fixed noise and noise levels."""

from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from cosmos_rl_core import seeds
from cosmos_rl_core.models._base import Model
from cosmos_rl_core.models._conditioning import Conditioning, generated, stack
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.parallel.precision import computes_in
from cosmos_rl_core.pipelines.buckets import Size
from cosmos_rl_core.storage import store
from stages import contracts
from stages.artifacts.layouts import Check, cut_alike
from stages.artifacts.request import Request
from stages.execution.context import Context
from stages.formats.embeddings import Embeddings
from stages.formats.latents import Latents
from stages.formats.losses import by_item, summary_of
from stages.formats.references import kinds_of
from stages.formats.tables import from_parquet, to_parquet
from stages.training.loading import load_policy


def run(request: Request, context: Context[Group]) -> dict[str, Any]:
    """Write ``losses.parquet``: one row per item and noise level, ``item_id, medium, t, loss``.

    The loss is the mean squared error of the velocity, without guidance and without weights, over frames that are not
    given.
    """
    config, ranks = request.settings(contracts.Validate), context.ranks
    latents = Latents.of(request)
    prompt_of: dict[str, str] = latents.index.set_index("item_id")["prompt_id"].to_dict()
    medium_of: dict[str, str] = latents.index.set_index("item_id")["medium"].to_dict()
    embeddings = Embeddings(request.inputs["embeddings"], prompt_of.values())
    kinds = kinds_of(request.inputs["embeddings"], config.model.path, latents.parts)

    def kind(item: str) -> tuple[Size | None, int]:
        return latents.size(item), kinds.get(prompt_of[item], 0)

    planned = cut_alike(list(prompt_of), context.shrunk(config.batch_size), kind)
    tiles = context.layout({"tiles": planned})["tiles"]
    model, _ = load_policy(request, config, components=(), context=context, reference=False)
    done, rows = 0, list[dict[str, Any]]()

    def read(items: list[str]) -> tuple[Tensor, list[Conditioning]]:
        return torch.stack([latents[item] for item in items]), [embeddings[prompt_of[item]] for item in items]

    def losses_of(numbers: list[int]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Yield the tiles of this rank with their losses."""
        # Ranks that share weights must do equal numbers of passes: a rank without a tile repeats one of another rank,
        # and drops the result.
        firsts = range(0, len(numbers), ranks.data_world_size)
        mine = [first + ranks.data_rank for first in firsts]
        dealt = [tiles[numbers[own if own < len(numbers) else first]] for first, own in zip(firsts, mine, strict=True)]
        with closing(store.ahead(dealt, read)) as made:
            for own, (items, (x_0, given)) in zip(mine, made, strict=True):
                context.progress("validating", done + own - ranks.data_rank, len(tiles))
                conditioning = stack(given, ranks.device)
                losses = _losses(request.seed, config, model, items, x_0.to(ranks.device), conditioning)
                if own < len(numbers) and ranks.leads:
                    yield numbers[own], losses

    for together in context.hands(len(tiles)):
        adopted = context.handed is not None and all(_adopted(context, together, tiles))
        for number, losses in () if adopted else losses_of(together):
            if context.handed is None:
                rows += losses
            else:
                files = {_name(number): to_parquet(pd.DataFrame(losses))}
                context.attempt.finish(number, files, _has(number, tiles[number]))
        done += len(together)
    if context.handed is not None:
        stored = (from_parquet(context.attempt.read(_name(number))) for number in context.own(len(tiles)))
        rows = [row for table in stored for row in table.to_dict("records")]
    table = pd.DataFrame([row for ranks_rows in ranks.gather(rows) for row in ranks_rows])
    table = table.sort_values(["item_id", "t"], ignore_index=True)
    table.insert(1, "medium", [medium_of[item] for item in table["item_id"]])
    if ranks.rank == 0:
        context.attempt.put(contracts.Validate.LOSSES, to_parquet(table))
    return summary_of(by_item(table))


def _name(tile: int) -> str:
    """Return the name of the losses of a tile that a worker made."""
    return f"{contracts.RECORDS}losses/{tile:05d}.parquet"


def _has(number: int, items: list[str]) -> Check:
    """Check that a file has losses of exactly these items."""

    def check(files: dict[str, bytes]) -> str | None:
        found = {one for data in files.values() for one in from_parquet(data)["item_id"]}
        return None if [*files] == [_name(number)] and found == {*items} else "it has losses of other items"

    return check


def _adopted(context: Context[Group], together: list[int], tiles: list[list[str]]) -> Iterator[bool]:
    """Yield whether each tile was finished by an earlier attempt, on all ranks alike. Collective."""
    ranks = context.ranks
    mine = together[ranks.rank :: ranks.world_size]
    yield from chain(*ranks.gather([context.attempt.adopt(number, _has(number, tiles[number])) for number in mine]))


@torch.no_grad()
def _losses(
    seed: int, config: contracts.Validate, model: Model, items: list[str], x_0: Tensor, conditioning: Conditioning
) -> list[dict[str, Any]]:
    """Return one row per item and noise level."""
    rows: list[dict[str, Any]] = []
    for level, t in enumerate((np.arange(config.num_levels) + 0.5) / config.num_levels):
        # The noise has its own purpose: media that are also trained on were never seen with it.
        draws = [seeds.normal(tuple(x_0.shape[1:]), "validation noise", seed, item, level) for item in items]
        noise = torch.from_numpy(np.stack(draws)).to(x_0.device)
        times = torch.full((len(items),), float(t), device=x_0.device)
        with computes_in(config.param_dtype, x_0.device):
            velocity = model.velocity((1 - float(t)) * x_0 + float(t) * noise, times, conditioning)
        losses = _mean((velocity - (noise - x_0)).square(), generated(conditioning))
        pairs = zip(items, losses.tolist(), strict=True)
        rows += [{"item_id": item, "t": float(t), "loss": loss} for item, loss in pairs]
    return rows


def _mean(errors: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean error of each sample, ``[B]``, over elements where the mask is 1."""
    if mask is None:
        return errors.flatten(1).mean(1)
    return (errors * mask).flatten(1).sum(1) / mask.expand_as(errors).flatten(1).sum(1)
