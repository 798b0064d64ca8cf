"""Pictures and videos of samples of a rollout, from their latents."""

import json
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import torch

from cosmos_rl_core.config.shared import Decoding
from cosmos_rl_core.models._base import Model
from cosmos_rl_core.parallel.distributed import Group
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.layouts import cut, holds
from stages.artifacts.request import Request
from stages.contracts import INDEX, MEDIA, TENSORS
from stages.execution.context import Context
from stages.formats.samples import (
    BY_GUARDRAIL,
    DECODED,
    REFUSED,
    StoredSample,
    all_rows,
    read_unit,
    unit_files,
    unit_name,
)
from stages.generating.decoding import decode_finite, decodes_in
from stages.generating.encoding import Encoding, UnitWriter, encoded
from stages.generating.plans import vae_batches
from stages.training.loading import load_model


def run(request: Request, context: Context[Group]) -> dict[str, Any]:
    """Write the parts ``index`` and ``media`` of the samples that the rollout did not decode, in the rollout's units.

    If the rollout's media were deleted, all finite samples are decoded. Units without such samples are left out, so the
    units have other numbers here than in the rollout. Pictures pass the guardrail like those that a rollout shows.
    """
    config, ranks = request.settings(contracts.Decode), context.ranks
    rollout = Artifact(request.one("samples"))
    left = [row for row in all_rows(rollout) if is_wanted(row, config)]
    units: dict[int, dict[str, dict[str, Any]]] = {}
    for row in left:
        units.setdefault(row.pop("unit"), {})[row["sample_id"]] = row
    planned = {"units": [[*rows] for rows in units.values()], "tile": context.shrunk(config.batch_size)}
    tile: int = context.layout(planned)["tile"]
    checks = {
        n: holds([unit_name(part, n) for part in (INDEX, MEDIA)], [*rows]) for n, rows in enumerate(units.values())
    }
    items, done = [*units.items()], 0

    def write(number: int, made: list[StoredSample]) -> None:
        context.attempt.finish(number, unit_files(number, made), checks[number])

    @cache
    def vae() -> Model:
        return load_model(config.model, ("vae", *config.model.guardrail), ranks.device)

    with UnitWriter({n: len(rows) for n, rows in enumerate(units.values())}, write) as writer:
        for n in context.units(len(items)):
            context.progress("decoding", done, len(context.own(len(items))))
            unit, rows = items[n]
            if not context.attempt.adopt(n, checks[n]):
                tensors = {one.sample_id: one for one in read_unit(rollout, unit, TENSORS) if one.sample_id in rows}
                for ids in cut([*rows], tile):
                    for part in vae_batches(len(ids), config.media):
                        latents = [tensors[one] for one in ids[part]]
                        writer.take(n, _decoded(vae(), config.decoding, ranks.device, latents, rows))
            done += 1
        context.progress("decoding", done, done)
    made = [json.loads(context.attempt.read(unit_name(INDEX, n))) for n in context.own(len(items))]
    nonfinite = sum(ranks.gather(sum(not row["finite"] for rows in made for row in rows)))
    refused = sum(ranks.gather(sum(REFUSED in row for rows in made for row in rows)))
    counts = {"samples": len(left)} | ({"nonfinite": nonfinite} if nonfinite else {})
    return counts | ({"refused": refused} if refused else {})


def is_wanted(row: Mapping[str, Any], config: contracts.Decode) -> bool:
    """Return whether this stage decodes the sample that a row of the rollout's index describes."""
    return not row.get(DECODED, True) if config.undecoded_only else row["finite"]


def _decoded(
    model: Model,
    decoding: Decoding,
    device: torch.device,
    samples: list[StoredSample],
    rows: Mapping[str, dict[str, Any]],
) -> list[Encoding]:
    """Decode samples, show them to the guardrail, and return for each the function that encodes its pixels."""
    latents = torch.stack([torch.from_numpy(one.final_latents) for one in samples])
    with decodes_in(decoding, device):
        pictures = decode_finite(model, latents, [True] * len(samples))
    found: list[Encoding] = []
    for one, picture in zip(samples, pictures, strict=True):
        row = {name: value for name, value in rows[one.sample_id].items() if name != DECODED}
        shown = None if picture is None else model.screen(picture)
        refused = {REFUSED: BY_GUARDRAIL} if picture is not None and shown is None else {}
        found.append(partial(encoded, row | refused, shown))
    return found
