"""The losses of a report: in training by optimizer step, on held-out media by policy version."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.contracts import METRICS
from stages.formats.losses import item_losses
from stages.formats.tables import read_table
from stages.reporting.curves import Series
from stages.reporting.numbers import Estimate

MAX_POINTS = 200
"""Points of the curve of training losses; of more optimizer steps, each point is the mean of some."""


@dataclass(frozen=True)
class HeldOutLoss:
    """The diffusion loss of a policy version on held-out media."""

    artifact: Artifact
    version: int
    items: Any
    """The loss of each item, the mean over noise levels, by item id."""

    @property
    def estimate(self) -> Estimate:
        """Return the mean over items; NaN if the loss of one is not finite, because other means had all items."""
        if not np.isfinite(self.items).all():
            return Estimate(math.nan, math.nan, 0)
        return Estimate.of(self.items)


def held_out_losses(request: Request) -> list[HeldOutLoss]:
    """Read the held-out losses of a report, in the order of the run."""
    artifacts = [Artifact(source) for source in request.inputs.get("validations", ())]
    return [HeldOutLoss(found, found.manifest.iteration or 0, item_losses(found)) for found in artifacts]


def best(losses: Sequence[HeldOutLoss]) -> HeldOutLoss | None:
    """Return the lowest loss, the earliest of equal ones; None if none is finite."""
    known = [loss for loss in losses if math.isfinite(loss.estimate.mean)]
    return min(known, key=lambda loss: loss.estimate.mean, default=None)


def steps_of(updates: Sequence[Artifact]) -> dict[int, int]:
    """Return the number of optimizer steps of each policy version."""
    found = {0: 0}
    for manifest in (update.manifest for update in updates):
        steps = manifest.config["steps"]
        found[(manifest.iteration or 0) + 1] = steps["first_step"] + len(steps["lrs"])
    return found


def training_losses(updates: Sequence[Artifact]) -> Series:
    """Return the loss of every optimizer step, or means of consecutive steps if there are many."""
    losses = pd.concat([read_table(update, METRICS) for update in updates])
    each = math.ceil(len(losses) / MAX_POINTS)
    if each == 1:
        steps = zip(losses["step"], losses["loss"], strict=True)
        return Series("loss", [(int(step), Estimate(float(loss), math.nan, 1)) for step, loss in steps], line=True)
    parts = [losses.iloc[start : start + each] for start in range(0, len(losses), each)]
    points = [(int(part["step"].iloc[0]), Estimate.of(part["loss"])) for part in parts]
    return Series(f"loss, mean of {each} steps ± 1 standard error", points, line=True)
