"""The parts of a dataset, read as one table: each part adds items, and removes items of earlier parts."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Self

import pandas as pd

from cosmos_rl_core.canonical import canonical_json, from_json
from cosmos_rl_core.datasets._base import Reference
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.contracts import Caption, Index, Split
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
REFERENCES = "references"
"""Column with the references of items as JSON, missing for an item without any. A table in which no item has references
lacks the column."""
INDEXED: dict[str, str] = {name: kind for name, kind in COLUMNS.items() if kind != "bool"}
INDEXED |= {REFERENCES: "string", "reason": "string"}
"""Columns of the rows read from sources, and their types. ``reason`` says why an item is not used, or is ""."""
LEFT_OUT: dict[str, str] = dict.fromkeys(("unit", "name", "reason"), "string")
"""Columns of ``left_out.parquet`` and their types."""
CAPTIONS: dict[str, str] = dict.fromkeys(
    ("item", "medium", "caption", "prompt_id", "captioner", "instruction"), "string"
)
"""Columns of ``captions.parquet`` and their types."""
REFUSED: dict[str, str] = dict.fromkeys(("item", *LEFT_OUT), "string")
"""Columns of ``refused.parquet`` and their types."""

_ORDER = ["unit", "name"]


NO_ITEMS = pd.DataFrame(columns=[*COLUMNS]).astype(COLUMNS)
"""A table without items."""


def items_table(found: Any) -> pd.DataFrame:
    """Return the table of items, sorted by unit and name."""
    return _sorted(found, COLUMNS | ({REFERENCES: "string"} if found[REFERENCES].notna().any() else {}))


def left_out_table(found: Any) -> pd.DataFrame:
    """Return the table of units and items that are left out, sorted by unit and name."""
    return _sorted(found, LEFT_OUT)


def _sorted(found: Any, columns: dict[str, str]) -> pd.DataFrame:
    return found[[*columns]].astype(columns).sort_values(_ORDER, ignore_index=True)


def table_of(rows: Iterable[dict[str, Any]], columns: dict[str, str]) -> pd.DataFrame:
    """Return the rows as a table with only ``columns``, which map names to types."""
    table: Any = pd.DataFrame([{name: row[name] for name in columns} for row in rows], columns=[*columns])
    return table.astype(columns)


def as_json(references: Iterable[Reference]) -> str | None:
    """Return references as JSON for a table's column; None without any."""
    found = [one.identity() for one in references]
    return canonical_json(found).decode() if found else None


def references_in(value: Any) -> tuple[Reference, ...]:
    """Return the references of an item in a table. The store has their bytes, by their digests."""
    return tuple(Reference(**one) for one in from_json(value)) if isinstance(value, str) else ()


def side_of(items: Any, split: Split | None) -> Any:
    """Return the items whose media are on a side of the split; all without a split."""
    if split is None:
        return items
    # Sha256 is uniform, so the first digits of a digest are a random number.
    held_out = items["medium"].str[:8].map(lambda digits: int(digits, 16) < split.held_out_share * 16**8)
    return items[held_out == (split.side == "held_out")].reset_index(drop=True)


class Parts:
    """The parts of a dataset, in order, and the captions that were written for them.

    ``captions`` are artifacts of the stage ``caption``; without any, items have only the captions of their files.
    """

    def __init__(self, artifacts: Sequence[Artifact], captions: Sequence[Artifact] = ()) -> None:
        self.artifacts, self.captions = list(artifacts), list(captions)

    @classmethod
    def of(cls, request: Request) -> Self:
        """Return the parts that a Request names."""
        parts, captions = (map(Artifact, request.inputs.get(role, ())) for role in ("parts", "captions"))
        return cls([*parts], [*captions])

    @cached_property
    def all_items(self) -> Any:
        """Return the items of all parts, also the items that a later part removes. ``part`` is the number of the part.

        ``captioner`` is the digest of the captioner; it is missing for a caption from the dataset's files.
        :func:`references_in` reads the column ``references``.
        ``new_medium`` and ``new_prompt`` say which items are the first with their medium and with their caption.
        """
        tables = [read_table(one, Index.ITEMS).assign(part=number) for number, one in enumerate(self.artifacts)]
        found: Any = pd.concat(tables or [NO_ITEMS.assign(part=0)], ignore_index=True)
        for name in {"captioner", REFERENCES} - {*found}:
            found[name] = pd.Series(pd.NA, index=found.index, dtype="string")
        if not self.captions:
            return found
        written = self.written.set_index("item")
        bare = found["caption"].isna()
        for name in ("caption", "prompt_id", "captioner"):
            found.loc[bare, name] = found.loc[bare, "item"].map(written[name])
        used = found["caption"].notna()
        for new, name in (("new_medium", "medium"), ("new_prompt", "prompt_id")):
            found[new] = used & ~found[name].where(used).duplicated()
        return found

    @cached_property
    def items(self) -> Any:
        """Return the items that are left after the last part, in order; if captions are read, only items with one."""
        return self._there[self._there["caption"].notna()].reset_index(drop=True) if self.captions else self._there

    def later(self) -> list[tuple[int, ...]]:
        """Return for each part the numbers of the later parts that add or remove items whose media it had first.

        Empty for a part that loses no such item.
        """
        items = self.all_items
        first = items.groupby("medium")["part"].transform("min")
        removing = [set[int]() for _ in self.artifacts]
        adding = [set[int]() for _ in self.artifacts]
        for part, number in {*zip(first, items["part"], strict=True)}:
            adding[part].add(number)
        for number, removed in enumerate(self._removed):
            for part in {*first[items["item"].isin(removed) & (items["part"] < number)]}:
                removing[part].add(number)
        pairs = enumerate(zip(removing, adding, strict=True))
        return [tuple(sorted((gone | new) - {part})) if gone else () for part, (gone, new) in pairs]

    def added(self, column: str) -> Any:
        """Return items of the last part whose value of ``column`` is in no earlier part, one for each value."""
        last = self.all_items["part"] == len(self.artifacts) - 1
        before = self.all_items.loc[~last, column]
        new = self.all_items[last & self.all_items[column].notna() & ~self.all_items[column].isin(before)]
        return new.drop_duplicates(column).sort_values(column, ignore_index=True)

    @cached_property
    def left_out(self) -> Any:
        """Return the units and items that are left out after the last part, with the reasons."""
        if not self.artifacts:
            return table_of((), LEFT_OUT)
        found: Any = read_table(self.artifacts[-1], Index.LEFT_OUT)
        if not self.captions:
            return found
        refused: Any = self.refused
        bare = self._there.loc[self._there["caption"].isna(), "item"]
        refused = refused.loc[refused["item"].isin(bare), [*LEFT_OUT]]
        return pd.concat([found, refused], ignore_index=True).sort_values(_ORDER, ignore_index=True)

    @cached_property
    def written(self) -> Any:
        """Return the captions that captioners wrote."""
        return self._written(Caption.CAPTIONS, CAPTIONS)

    @cached_property
    def refused(self) -> Any:
        """Return the items that captioners refused, with the reasons."""
        return self._written(Caption.REFUSED, REFUSED)

    @cached_property
    def stamps(self) -> dict[str, str]:
        """Return the stamps of all units when the last part was made."""
        if not self.artifacts:
            return {}
        table = read_table(self.artifacts[-1], Index.STAMPS)
        return dict(zip(table["unit"], table["stamp"], strict=True))

    @cached_property
    def _removed(self) -> list[Any]:
        """Return for each part the ids of the items that it removes."""
        return [read_table(one, Index.REMOVED)["item"] for one in self.artifacts]

    @cached_property
    def _there(self) -> Any:
        """Return the items that are left after the last part, with or without a caption."""
        there = pd.Series(data=True, index=self.all_items.index)
        for number, removed in enumerate(self._removed):
            there &= ~(self.all_items["item"].isin(removed) & (self.all_items["part"] < number))
        return self.all_items[there].reset_index(drop=True)

    def _written(self, name: str, columns: dict[str, str]) -> Any:
        """Return the rows of the table ``name`` of all caption artifacts; if an item has several, the latest."""
        tables = [table_of((), columns), *(read_table(one, name) for one in self.captions)]
        return pd.concat(tables, ignore_index=True).drop_duplicates("item", keep="last", ignore_index=True)
