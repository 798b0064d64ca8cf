"""The parts of a dataset, read as one: each adds items and removes some of those before it."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import pandas as pd

from stages.artifacts.artifact import Artifact
from stages.contracts import Index
from stages.formats.tables import read_table

COLUMNS = {
    "item": "string",
    "unit": "string",
    "name": "string",
    "kind": "string",
    "medium": "string",
    "prompt_id": "string",
    "caption": "string",
    "metadata": "string",
    "size_bytes": "int64",
    "height": "int64",
    "width": "int64",
    "frames": "int64",
    "fps": "float64",
    "new_medium": "bool",
    "new_prompt": "bool",
}
"""Columns of ``items.parquet`` and their types."""
LEFT_OUT: dict[str, str] = dict.fromkeys(("unit", "name", "reason"), "string")
"""Columns of ``left_out.parquet`` and their types."""


def items_table(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Return the table of items, sorted by unit and name."""
    return _table(rows, COLUMNS)


def left_out_table(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Return the table of what is left out, sorted by unit and name."""
    return _table(rows, LEFT_OUT)


def _table(rows: Iterable[dict[str, Any]], columns: dict[str, str]) -> pd.DataFrame:
    table: Any = pd.DataFrame([{name: row[name] for name in columns} for row in rows], columns=[*columns])
    return table.astype(columns).sort_values(["unit", "name"], ignore_index=True)


class Parts:
    """The parts of a dataset, in order."""

    def __init__(self, artifacts: Sequence[Artifact]) -> None:
        self.artifacts = list(artifacts)

    @cached_property
    def all_items(self) -> Any:
        """Return the items of all parts, those too that a later part removes. ``part`` is the number of the part."""
        tables = [read_table(one, Index.ITEMS).assign(part=number) for number, one in enumerate(self.artifacts)]
        return pd.concat(tables or [items_table(()).assign(part=0)], ignore_index=True)

    @cached_property
    def items(self) -> Any:
        """Return the items that are there after the last part, in order."""
        there = pd.Series(data=True, index=self.all_items.index)
        for number, one in enumerate(self.artifacts):
            removed = read_table(one, Index.REMOVED)["item"]
            there &= ~(self.all_items["item"].isin(removed) & (self.all_items["part"] < number))
        return self.all_items[there].reset_index(drop=True)

    @cached_property
    def left_out(self) -> Any:
        """Return what is left out after the last part, with the reasons."""
        if not self.artifacts:
            return left_out_table(())
        return read_table(self.artifacts[-1], Index.LEFT_OUT)

    @cached_property
    def stamps(self) -> dict[str, str]:
        """Return the stamps of all units when the last part was made."""
        if not self.artifacts:
            return {}
        table = read_table(self.artifacts[-1], Index.STAMPS)
        return dict(zip(table["unit"], table["stamp"], strict=True))
