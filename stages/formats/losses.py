"""Held-out losses: the table of `validate`, and the numbers of a policy that follow from it."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from cosmos_rl_core.estimates.estimate import Compared, Sums
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.formats.tables import read_table

PAIRED, APART = "item by item", "other items"
"""Words for how two validations are compared."""


def item_losses(artifact: Artifact) -> Any:
    """Return one row per held-out item, by its id: ``loss``, the mean over its noise levels, and its ``medium``."""
    return by_item(read_table(artifact, contracts.Validate.LOSSES))


def by_item(table: Any) -> Any:
    """Return one row per item of a table with one row per item and noise level, as :func:`item_losses` does."""
    # Version 1 of the stage did not name media; each item was taken to have its own.
    named = table if "medium" in table else table.assign(medium=table["item_id"])
    items = named.groupby("item_id")
    # By default pandas leaves NaN out of means.
    means = items["loss"].agg(lambda losses: losses.mean(skipna=False))
    return pd.DataFrame({"loss": means, "medium": items["medium"].first()})


def sums_of(items: Any) -> Sums:
    """Return the losses of items, summed within media: losses of clips and captions of one medium are correlated.

    Their mean is NaN if the loss of an item is not finite, because a mean over the other items could not be compared
    with another policy's.
    """
    return Sums.of(items["loss"].fillna(np.inf), items["medium"])


def summary_of(items: Any) -> dict[str, float | int | None]:
    """Return the mean loss of items and its standard error over media.

    Both are None if the loss of an item is not finite; ``nonfinite`` counts such items.
    """
    nonfinite = int((~np.isfinite(items["loss"])).sum())
    if nonfinite:
        return {"loss": None, "standard_error": None, "items": len(items), "nonfinite": nonfinite}
    found = sums_of(items).estimate
    error = found.error if np.isfinite(found.error) else None
    return {"loss": found.mean, "standard_error": error, "items": len(items)}


def summary_from(artifact: Artifact) -> dict[str, Any]:
    """Return the numbers of the summary that follow from the table."""
    return summary_of(item_losses(artifact))


def numbers_of(manifest: Manifest) -> dict[str, Any]:
    """Return the numbers of a validation's line in ``metrics.jsonl``, by their names after ``val/``."""
    keys = {"avg_loss": "loss", "avg_loss_standard_error": "standard_error", "seconds": "seconds"}
    return {name: manifest.summary.get(key) for name, key in keys.items()}


def compared(a: Artifact, b: Artifact) -> Iterator[Compared]:
    """Yield the losses of two validations over the items that both have, or over all items if they share none."""
    tables = [item_losses(one) for one in (a, b)]
    shared = tables[0].index.intersection(tables[1].index)
    if not shared.empty:
        tables = [table.loc[shared] for table in tables]
    one, other = (sums_of(table) for table in tables)
    if all(math.isfinite(sums.estimate.mean) for sums in (one, other)):
        same_noise = a.manifest.seed == b.manifest.seed and _levels(a) == _levels(b)
        how = (PAIRED if same_noise else f"{PAIRED}, other noise") if not shared.empty else APART
        yield Compared("avg_loss", (one, other), how)


def _levels(validated: Artifact) -> Any:
    return validated.manifest.config.get("num_levels")
