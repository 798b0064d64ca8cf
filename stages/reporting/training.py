"""The numbers of optimizer steps as curves."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from cosmos_rl_core.estimates.digits import number
from cosmos_rl_core.estimates.estimate import Estimate
from stages.reporting.book import Book, Trained
from stages.reporting.curves import SMALL, Series, curve

MAX_POINTS = 200
"""Most points of a curve. If there are more optimizer steps, each point is the mean of some."""
CURVES = {
    "loss": "Loss",
    "policy_loss": "Loss from rewards",
    "data_loss": "Diffusion loss on data",
    "kl": "KL divergence to the reference",
    "approx_kl": "KL divergence to the behaviour policy",
    "old_deviation": "Distance from the old policy",
    "optimality": "Optimality of samples",
    "ratio": "Ratio of new to old density",
    "clipped": "Clip fraction",
    "effective_sample_size": "Effective sample size",
    "grad_norm": "Gradient norm, before clipping",
    "logp_drift": "Drift of the log-density, nats a dimension",
    "lr": "Learning rate",
}
"""Columns of the metrics that are drawn, in order, and their titles."""


@dataclass(frozen=True)
class Drawn:
    """The curve of one metric over the optimizer steps, with its newest, largest and smallest value."""

    column: str
    title: str
    svg: Markup
    newest: str
    largest: str
    """The greatest value, and the iteration and step that had it."""
    smallest: str


def drawn(book: Book) -> list[Drawn]:
    """Return the curves of all numbers that the optimizer steps have."""
    if not book.trained:
        return []
    tables = [one.steps.assign(iteration=one.k) for one in book.trained]
    table: Any = pd.concat(tables, ignore_index=True)
    return [_drawn(name, table) for name in CURVES if name in table and np.isfinite(table[name]).any()]


def _drawn(name: str, table: Any) -> Drawn:
    known = table[np.isfinite(table[name])]
    top, bottom = known.loc[known[name].idxmax()], known.loc[known[name].idxmin()]
    series = over_steps(known["step"], known[name], CURVES[name])
    return Drawn(
        column=name,
        title=CURVES[name],
        svg=curve([series], "optimizer steps done", SMALL),
        newest=number(float(known[name].iloc[-1])),
        largest=_place(top, name),
        smallest=_place(bottom, name),
    )


def _place(row: Any, name: str) -> str:
    return f"{number(float(row[name]))} in iteration {int(row['iteration'])} (step {int(row['step'])})"


def over_steps(steps: Any, values: Any, label: str) -> Series:
    """Return the value of every optimizer step, or means of consecutive steps if there are many."""
    each = math.ceil(len(values) / MAX_POINTS)
    if each <= 1:
        points = [(int(s), _alone(float(v), 1)) for s, v in zip(steps, values, strict=True)]
        return Series(label, points, line=True)
    blocks = [slice(start, start + each) for start in range(0, len(values), each)]
    means = ((steps.iloc[some], values.iloc[some]) for some in blocks)
    points = [(int(places.iloc[0]), _alone(float(found.mean()), len(found))) for places, found in means]
    return Series(f"{label}, mean of {each} steps", points, line=True)


def _alone(value: float, steps: int) -> Estimate:
    """Return an estimate without an error, because consecutive steps are not independent."""
    return Estimate(value, math.nan, steps, 0)


def losses(trained: Sequence[Trained]) -> Series:
    """Return the training loss by optimizer step."""
    table: Any = pd.concat([one.steps for one in trained], ignore_index=True)
    return over_steps(table["step"], table["loss"], "loss")
