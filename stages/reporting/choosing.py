"""Choice of the samples that a report shows: fixed, typical, extreme, failed, and most changed samples."""

from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Ids = tuple[str, ...]

FIXED = 8
"""Held-out samples that are shown at every judged policy version."""
TYPICAL = 4
"""Samples of a rollout that are shown regardless of their scores."""
EXTREMES = 4
"""Samples with the best rewards, and samples with the worst rewards."""
WIDEST = 2
"""Prompts whose rewards differ most; the best and the worst sample of each are shown."""
FAILED = 2
CHANGED = 6
"""Samples that improved most, and samples that worsened most."""
TRIPPED = 4
"""For each limit, the samples that exceed it most."""


def evenly(values: Sequence[T], most: int) -> list[T]:
    """Return at most ``most`` of the values, evenly spaced, the first and the last among them."""
    count = min(most, len(values))
    return [values[i * (len(values) - 1) // max(1, count - 1)] for i in range(count)]


def of_rollout(table: Any) -> dict[str, Ids]:
    """Return ids of samples of a rollout by the reason why they are shown.

    ``table`` has one row per sample: ``prompt_id``, ``score`` (NaN without one), ``failed``.
    """
    known = table["score"].dropna()
    ordered = known.sort_values(kind="stable")
    return {
        "typical": tuple(evenly(list(table.index), TYPICAL)),
        "best": tuple(known.sort_values(ascending=False, kind="stable").index[:EXTREMES]),
        "worst": tuple(ordered.index[:EXTREMES]),
        "widest": _widest(table),
        "failed": tuple(table.index[table["failed"]][:FAILED]),
    }


def _widest(table: Any) -> Ids:
    """Return the best and the worst sample of the prompts whose rewards differ most, in pairs."""
    groups = table.dropna(subset=["score"]).groupby("prompt_id", sort=False)["score"]
    spreads = (groups.max() - groups.min()).sort_values(ascending=False, kind="stable")
    spreads = spreads[spreads > 0].head(WIDEST)
    best, worst = groups.idxmax(), groups.idxmin()
    return tuple(one for prompt in spreads.index for one in (best[prompt], worst[prompt]))


def of_judged(table: Any, first: Any | None) -> dict[str, Ids]:
    """Return ids of held-out samples by the reason why they are shown.

    ``first`` is the table of the same samples of version 0, None for version 0 itself.
    """
    ordered = table["score"].dropna().sort_values(kind="stable")
    found: dict[str, Ids] = {
        "fixed": tuple(evenly(list(table.index), FIXED)),
        "worst": tuple(ordered.index[:EXTREMES]),
        "failed": tuple(table.index[table["failed"]][:FAILED]),
    }
    if first is not None:
        change = (table["score"] - first["score"]).dropna()
        rises, falls = change[change > 0], change[change < 0]
        found["improved"] = tuple(rises.sort_values(ascending=False, kind="stable").index[:CHANGED])
        found["worsened"] = tuple(falls.sort_values(kind="stable").index[:CHANGED])
    return found
