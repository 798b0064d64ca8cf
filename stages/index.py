"""One part of a dataset: the new items of its sources, and the items that have gone.

Digests of their bytes identify media and captions. Files with an unchanged stamp are not read, and no more of
a medium is decoded than its facts need. The bytes of references are kept in the store, in the pool of its pictures.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pandas as pd

from cosmos_rl_core.canonical import canonical_json, digest
from cosmos_rl_core.datasets import _sources
from cosmos_rl_core.datasets._base import Item, ItemError, Source, prompt_id
from cosmos_rl_core.datasets._probe import probe
from cosmos_rl_core.errors import DatasetError
from cosmos_rl_core.storage import store
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.layouts import Check, cut
from stages.artifacts.pool import INDEX, PICTURES, index_of, put_picture, renewed_picture
from stages.artifacts.records import FileEntry
from stages.artifacts.request import Request
from stages.artifacts.slots import folder_of
from stages.execution.context import Context, Ranks
from stages.formats import parts
from stages.formats.tables import from_parquet, to_parquet

Row = dict[str, Any]
SAME = "the same medium and caption as "
"""Beginning of the reason why a duplicate is left out."""
CHANGED = "the files of the dataset have changed since this index was planned; start it again"
KEY = ["medium", "prompt_id"]
"""Columns whose values duplicates have in common."""
MADE_HERE = "made_here"
"""Column that says whether this attempt has read an item; False if an earlier one has."""
NOTHING: Row = {name: 0 if kind in ("int64", "float64") else None for name, kind in parts.INDEXED.items()}
"""Columns of a row before its facts are known, and of a unit or item that cannot be used."""
THREADS = 8
"""Units read at once: most of the time is spent in reading and hashing, which release the interpreter lock."""


def run(request: Request, context: Context[Ranks]) -> dict[str, int]:
    """Write ``items.parquet``, ``removed.parquet`` and ``left_out.parquet``, and a record of the stamps.

    Raises :class:`DatasetError` if the sources have changed since the Request was made, and if too many items cannot be
    used.
    """
    config = request.settings(contracts.Index)
    sources = {label: _sources.source_of(options) for label, options in config.sources.items()}
    stamps = _sources.stamps(sources)
    if _sources.digest(stamps) != config.stamps:
        raise DatasetError(CHANGED)
    before = parts.Parts([Artifact(source) for source in request.inputs.get("parts", ())])
    seen = {unit for unit, stamp in stamps.items() if before.stamps.get(unit) == stamp}
    gone = before.stamps.keys() - stamps.keys()
    read = {unit for unit in stamps if config.verify or unit not in seen}
    read |= _units_with_duplicates(before, read | gone)
    changed = [unit for unit in stamps if unit in read]
    rows = _read(context, sources, changed, config)
    old: Any = before.items[before.items["unit"].isin([*changed, *gone])]
    if config.duplicates == "drop":
        rows = _without_duplicates(rows, before.items.drop(old.index), old["item"])
    unchanged: Any = before.left_out[~before.left_out["unit"].isin([*changed, *gone])]
    left_out: Any = pd.concat([unchanged, rows.loc[rows["reason"] != "", [*parts.LEFT_OUT]]], ignore_index=True)
    used: Any = rows[rows["reason"] == ""]
    found = used.drop_duplicates("item")
    removed: Any = old.loc[~old["item"].isin(found["item"]), ["item", "unit", "name"]]
    new: Any = found[~found["item"].isin(old["item"])]
    _refuse_too_many(left_out, len(before.items) - len(removed) + len(new), config.max_left_out)
    attempt = context.attempt
    if kept := _pooled_references(request, sources, new):
        attempt.put_json(INDEX, index_of(kept))
    attempt.put(config.ITEMS, to_parquet(parts.items_table(_with_firsts(new, before))))
    attempt.put(config.REMOVED, to_parquet(removed.sort_values("item", ignore_index=True)))
    attempt.put(config.LEFT_OUT, to_parquet(parts.left_out_table(left_out)))
    attempt.put(config.STAMPS, to_parquet(pd.DataFrame({"unit": [*stamps], "stamp": [*stamps.values()]})))
    counts = {"items": len(new), "removed": len(removed), "left_out": len(left_out), "units_read": len(changed)}
    if config.verify:
        differing = removed[removed["unit"].isin(seen)]
        attempt.put(config.DIFFERING, to_parquet(differing))
        counts["differing"] = len(differing)
    return counts


def _units_with_duplicates(before: parts.Parts, touched: set[str]) -> set[str]:
    """Return the units with items that were left out as duplicates; none if no ``touched`` unit has a used item.

    A used item of a touched unit may go, and then a duplicate of it is used.
    """
    if not touched & {*before.items["unit"]}:
        return set()
    return {*before.left_out.loc[before.left_out["reason"].str.startswith(SAME), "unit"]}


def _read(
    context: Context[Ranks], sources: Mapping[str, Source], units: list[str], config: contracts.Index
) -> pd.DataFrame:
    """Return one row per item of all changed units. Collective.

    Each shard is read, or adopted from an earlier attempt; the column :data:`MADE_HERE` says which.
    """
    shards = _cut(sources, units, config.units_per_shard)
    # The names of all units would be a file of many megabytes. A digest of them is enough.
    context.layout({"units": [[digest(shard)] for shard in shards]})
    names = [f"{contracts.RECORDS}rows/{number:05d}.parquet" for number in range(len(shards))]
    done, root, here = 0, folder_of(context.attempt.request.slot), set[str]()
    for number in context.units(len(shards)):
        shard, check = shards[number], _has(shards[number])
        context.progress("indexing", done, len(units))
        if not context.attempt.adopt(number, check):
            with ThreadPoolExecutor(THREADS) as pool:
                found = pool.map(lambda unit: _rows(sources, unit, config, root), shard)
                made = [row for rows in found for row in rows]
            context.attempt.finish(number, {names[number]: to_parquet(parts.table_of(made, parts.INDEXED))}, check)
            here.add(names[number])
        done += len(shard)
    context.progress("indexing", len(units), len(units))
    tables = [from_parquet(context.attempt.read(name)).assign(**{MADE_HERE: name in here}) for name in names]
    none = parts.table_of((), parts.INDEXED | {MADE_HERE: "bool"})
    return pd.concat([none, *tables], ignore_index=True)


def _cut(sources: Mapping[str, Source], units: Sequence[str], size: int) -> list[list[str]]:
    """Divide units into shards: of ``size`` files that hold one item each, or of a few files that hold many."""
    ones, many = list[str](), list[str]()
    for unit in units:
        source, _ = _sources.place_of(sources, unit)
        (many if getattr(source, "many", False) else ones).append(unit)
    return [*cut(ones, size), *cut(many, THREADS)]


def _has(units: list[str]) -> Check:
    """Check that a shard holds rows of exactly these units."""

    def check(files: dict[str, bytes]) -> str | None:
        found = {unit for data in files.values() for unit in from_parquet(data)["unit"]}
        return None if found == {*units} else "it has rows of other units"

    return check


def _rows(sources: Mapping[str, Source], unit: str, config: contracts.Index, root: str) -> list[Row]:
    """Return one row per item of a unit; a unit that cannot be used is one row with the reason."""
    source, name = _sources.place_of(sources, unit)
    try:
        found = [_row(source, unit, item, config, root) for item in source.items(name)]
    except ItemError as error:
        return [NOTHING | {"unit": unit, "name": name, "reason": str(error)}]
    except FileNotFoundError as error:
        raise DatasetError(f"{CHANGED} ({error})") from error
    return found or [NOTHING | {"unit": unit, "name": name, "reason": "no item"}]


def _row(source: Source, unit: str, item: Item, config: contracts.Index, root: str) -> Row:
    row = NOTHING | {"unit": unit, "name": item.name, "reason": ""}
    try:
        with closing(source.open(item.name)) as file:
            facts = probe(file, item.kind)
        pictures = _sources.references_of(source, item)
    except ItemError as error:
        return row | {"reason": str(error)}
    text, digests = item.caption, [reference.digest for reference, _ in pictures]
    row |= facts._asdict() | {"kind": item.kind, "caption": text, "metadata": canonical_json(item.metadata).decode()}
    row |= {"prompt_id": prompt_id(text, digests) if text is not None else None}
    row |= {parts.REFERENCES: parts.as_json(reference for reference, _ in pictures)}
    # Without references, the digest is the same as in earlier versions.
    row["item"] = digest([facts.medium, text, row["metadata"], unit, item.name, *([digests] if digests else [])])[:32]
    row["reason"] = "; ".join(_misfits(row, config))
    for _, data in () if row["reason"] else pictures:
        put_picture(root, data)
    return row


def _pooled_references(request: Request, sources: Mapping[str, Source], new: Any) -> dict[str, FileEntry]:
    """Return the pool's files of the new items' references, each written or given a new date by this attempt.

    A sweep may delete an old file that an earlier attempt stored. If it is gone, it is read from its source again.
    """
    root, rows = folder_of(request.slot), new[new[parts.REFERENCES].notna()].to_dict("records")
    named = [(one.digest, row) for row in rows for one in parts.references_in(row[parts.REFERENCES])]
    wanted, young = dict(named), {name for name, row in named if row[MADE_HERE]}

    def entry(name: str) -> FileEntry:
        if name not in young:
            return renewed_picture(root, name) or _stored_again(root, sources, wanted[name], name)
        size = store.size(store.join(root, path := f"{PICTURES}/{name}"))
        if size is None:
            return _stored_again(root, sources, wanted[name], name)
        return FileEntry(path=path, size=size, sha256=name)

    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(wanted, pool.map(entry, wanted), strict=True))


def _stored_again(root: str, sources: Mapping[str, Source], row: Row, name: str) -> FileEntry:
    """Read the references of an item again, and return the pool's file of the one with the digest ``name``."""
    source, unit = _sources.place_of(sources, row["unit"])
    try:
        (item,) = (one for one in source.items(unit) if one.name == row["name"])
        pictures = _sources.references_of(source, item)
    except (FileNotFoundError, ItemError, ValueError) as error:
        raise DatasetError(f"{CHANGED} ({error})") from error
    found = [put_picture(root, data) for reference, data in pictures if reference.digest == name]
    if not found:
        raise DatasetError(CHANGED)
    return found[0]


def _misfits(row: Row, config: contracts.Index) -> Iterator[str]:
    """Yield each reason why an item with intact files is not used."""
    (height, width), frames = config.min_size, config.min_frames
    if row["height"] < height or row["width"] < width:
        yield f"{row['height']} x {row['width']} pixels, expected at least {height} x {width}"
    if row["frames"] < frames:
        yield f"{row['frames']} frames, expected at least {frames}"
    if config.max_frames is not None and row["frames"] > config.max_frames:
        yield f"{row['frames']} frames, expected at most {config.max_frames}"
    if config.max_seconds is not None and row["kind"] == "video":
        yield from _too_long(row["frames"], row["fps"], config.max_seconds)
    if config.captioned and row["caption"] is None:
        yield "no caption"


def _too_long(frames: int, fps: float, most_s: float) -> Iterator[str]:
    """Yield the reason why a video's duration is refused, if it is."""
    if not fps:
        yield f"its frames per second are unknown, so whether it is at most {most_s:g} s long is too"
    elif frames / fps > most_s:
        yield f"{frames / fps:.2f} s, expected at most {most_s:g} s"


def _without_duplicates(rows: Any, unchanged: Any, known: Any) -> Any:
    """Return the rows, with a reason in each duplicate: another item has the same medium and caption.

    ``unchanged`` are the items that are not read again. ``known`` are items that are already in the dataset: they are
    kept, and new duplicates of them are left out.
    """
    rows = rows.assign(new=~rows["item"].isin(known)).sort_values("new", kind="stable", ignore_index=True)
    used, there = rows[rows["reason"] == ""], unchanged.drop_duplicates(KEY, keep="last")
    both = pd.concat([there, used], keys=["unchanged", "rows"])
    place = both["unit"].str.partition("/")[0] + "/" + both["name"]
    first = place.groupby([both["medium"], both["prompt_id"].fillna("")]).transform("first")
    same = first[first != place].get("rows", pd.Series(dtype="string"))
    rows.loc[same.index, "reason"] = SAME + same
    return rows.drop(columns="new")


def _with_firsts(new: Any, before: parts.Parts) -> Any:
    """Add columns that say whether a row is the first with its medium, and with its caption, over all parts."""
    firsts: dict[str, Any] = {}
    for name, column in (("new_medium", "medium"), ("new_prompt", "prompt_id")):
        firsts[name] = ~new[column].isin(before.all_items[column].dropna()) & ~new[column].duplicated()
    return new.assign(**firsts)


def _refuse_too_many(left_out: Any, used: int, limit: float) -> None:
    left_out = left_out[~left_out["reason"].str.startswith(SAME)]
    total = used + len(left_out)
    if len(left_out) > limit * total:
        rows = zip(left_out["name"][:10], left_out["reason"][:10], strict=True)
        shown = "".join(f"\n  {name}: {reason}" for name, reason in rows)
        more = f"\n  and {len(left_out) - 10} more" if len(left_out) > 10 else ""
        raise DatasetError(
            f"{len(left_out)} of {total} items cannot be used, more than max_left_out = {limit:g} allows; mend or "
            f"remove them, or raise the limit:{shown}{more}"
        )
