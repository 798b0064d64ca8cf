"""Limits on what is left out of a dataset."""

from collections.abc import Sequence
from typing import Any

from cosmos_rl_core.errors import DatasetError

SHOWN = 10
"""Rows that an error names."""


def refuse_too_many(left_out: Sequence[dict[str, Any]], total: int, limit: float, noun: str) -> None:
    """Raise :class:`DatasetError` if more than a share ``limit`` of all rows is left out, or all of them."""
    if len(left_out) <= limit * total and len(left_out) < max(total, 1):
        return
    shown = "".join(f"\n  {row['source']}, {row['name']}: {row['reason']}" for row in left_out[:SHOWN])
    more = f"\n  and {len(left_out) - SHOWN} more" if len(left_out) > SHOWN else ""
    raise DatasetError(
        f"{len(left_out)} of {total} {noun} cannot be used, and max_left_out = {limit:g}; mend or remove them, or "
        f"raise the limit:{shown}{more}"
    )
