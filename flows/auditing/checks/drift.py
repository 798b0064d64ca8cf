"""Check of the transitions of an update: they belong to its samples, and their means to its optimizer steps."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from cosmos_rl_core.algorithms._needs import DRIFT_METRICS
from cosmos_rl_core.estimates.sample_size import effective_sample_size
from stages.contracts import METRICS

SIZE = "effective_sample_size"
ROUNDING = 1e-9
"""Fraction of a column's mean absolute value by which means that were summed in another order may differ."""


def differences(transitions: Any, metrics: Any, advantages: Any, first_step: int) -> Iterator[tuple[str, str]]:
    """Yield where the transitions of an update contradict its other tables: the field, and a sentence.

    ``metrics`` has one row for each optimizer step; ``first_step`` is the number of the first. Only means are
    compared, so changes of rows that cancel out are not found.
    """
    used = {*zip(advantages["rollout"], advantages["sample_id"], advantages["used"], strict=True)}
    trained = {(rollout, sample_id) for rollout, sample_id, is_used in used if is_used}
    for rollout, sample_id in dict.fromkeys(zip(transitions["rollout"], transitions["sample_id"], strict=True)):
        if (rollout, sample_id) not in trained:
            yield "samples", f"{sample_id} was not trained on"
            return
    groups = {first_step + int(index): rows for index, rows in transitions.groupby("optimizer_step")}
    steps = [int(step) for step in metrics["step"]]
    if sorted(groups) != steps:
        yield "optimizer steps", f"{sorted(groups)}, {METRICS} says {steps}"
        return
    for row in metrics.to_dict("records"):
        rows = groups[int(row["step"])]
        for name in DRIFT_METRICS:
            if name in row and not _is_mean(rows[name].to_numpy(np.float64), row[name]):
                told = f"a mean of {rows[name].mean()}, {METRICS} says {row[name]}"
                yield f"{name}, optimizer step {row['step']}", told
        if SIZE in row and not _near(size := effective_sample_size(rows["log_ratio"].to_numpy(np.float64)), row[SIZE]):
            yield f"{SIZE}, optimizer step {row['step']}", f"{size}, {METRICS} says {row[SIZE]}"


def _is_mean(values: Any, mean: float) -> bool:
    rounding = ROUNDING * float(np.abs(values).mean())
    return _near(float(values.mean()), mean, rounding)


def _near(found: float, expected: float, rounding: float = 0.0) -> bool:
    if math.isnan(found) or math.isnan(expected):
        return math.isnan(found) and math.isnan(expected)
    return math.isclose(found, expected, rel_tol=ROUNDING, abs_tol=max(rounding, 1e-12))
