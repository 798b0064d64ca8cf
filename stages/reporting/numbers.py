"""Limits that tripped, in words for people. Imports nothing heavy, because commands print them."""

from collections.abc import Mapping
from typing import Any

from cosmos_rl_core.estimates.digits import number, signed


def words(row: Mapping[str, Any]) -> str:
    """Return a row of the evidence's ``tripped`` in words.

    For example ``luma of pixel_statistics rose from 0.4 to 0.6 (z-score +2.1), by 7.3 standard errors; rise = 6``.
    """
    score = row["score"] if row["score"] == row["reward"] else f"{row['score']} of {row['reward']}"
    bound, now, limit, z = row["bound"], number(row["mean"]), number(row["limit"]), z_score(row["z"])
    if bound in ("below", "above"):
        return f"{score} is {now}, {bound} the limit of {limit} (iteration 0: {number(row['first'])}, z-score {z})"
    how = "fell" if bound == "fall" else "rose"
    # None, because all samples of iteration 0 had one value.
    drift = "infinitely many" if row["drift"] is None else number(abs(row["drift"]))
    change = f"{how} from {number(row['first'])} to {now} (z-score {z})"
    return f"{score} {change}, by {drift} standard errors; {bound} = {limit}"


def z_score(z: float | None) -> str:
    """Format a z-score with its sign; a dash if there is none."""
    return "\u2013" if z is None else signed(z)
