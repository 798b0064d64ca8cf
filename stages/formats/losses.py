"""Held-out losses: the table of `validate`, and what it says of a policy."""

import math
from typing import Any

import numpy as np

from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.formats.tables import read_table


def item_losses(artifact: Artifact) -> Any:
    """Return the loss of each held-out item, the mean over its noise levels, as a Series by item id."""
    table: Any = read_table(artifact, contracts.Validate.LOSSES)
    return table.groupby("item_id")["loss"].mean()


def summary_of(losses: np.ndarray) -> dict[str, float | int | None]:
    """Return the mean loss and its standard error over items, from ``losses`` ``[items, levels]``.

    Both are None if the loss of an item is not finite, because a mean over the other items could not be compared with
    that of another policy. ``nonfinite`` counts such items.
    """
    means = losses.mean(axis=1)
    nonfinite = int((~np.isfinite(means)).sum())
    if nonfinite:
        return {"loss": None, "standard_error": None, "items": len(means), "nonfinite": nonfinite}
    error = float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else None
    return {"loss": float(means.mean()), "standard_error": error, "items": len(means)}
