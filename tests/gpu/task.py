"""What a part of the lane is given."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
"""A measured row, as plain JSON data."""
Rows = Iterator[Row]


@dataclass(frozen=True)
class Task:
    """How a part is to be done."""

    tiny: bool
    """On a CPU, with tiny shapes: to see that it works."""
    options: tuple[str, ...] = ()
    known: dict[str, list[Row]] = field(default_factory=dict[str, list[Row]])
    """The rows of the parts that began before, by part."""

    def fact(self, part: str, **where: Any) -> Row:
        """Return the last row of a part with these values; empty if there is none."""
        rows = self.known.get(part, [])
        return next((row for row in reversed(rows) if where.items() <= row.items()), {})
