"""One part of a dataset: the new items of its sources, and those that have gone.

Media and captions are known by the digests of their bytes. Files with an unchanged stamp are not read, and no more of
a medium is decoded than its facts need.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pandas as pd

from cosmos_rl_core.canonical import canonical_json, digest
from cosmos_rl_core.datasets import _sources
from cosmos_rl_core.datasets._base import Item, ItemError, Source, prompt_id
from cosmos_rl_core.datasets._probe import probe
from cosmos_rl_core.errors import DatasetError
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.layouts import Check, cut
from stages.artifacts.request import Request
from stages.execution.context import Context, Ranks
from stages.formats import parts
from stages.formats.tables import to_parquet

Rows = list[dict[str, Any]]
SAME = "the same medium and caption as "
"""Begin of the reason why an item is left out whose medium is already there under its caption."""
CHANGED = "the files of the dataset have changed since this index was planned; start it again"
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
    read |= _same(before, read | gone)
    changed = [unit for unit in stamps if unit in read]
    rows = _read(context, sources, changed, config)
    old: Any = before.items[before.items["unit"].isin([*changed, *gone])]
    known = {*old["item"]}
    if config.duplicates == "drop":
        rows = _without_duplicates(rows, before.items.drop(old.index), known)
    standing: Any = before.left_out[~before.left_out["unit"].isin([*changed, *gone])]
    left_out = [*standing.to_dict("records"), *(row for row in rows if row["reason"])]
    found = {row["item"]: row for row in rows if not row["reason"]}
    removed: Any = old.loc[~old["item"].isin([*found]), ["item", "unit", "name"]]
    new = [row for item, row in found.items() if item not in known]
    _refuse_too_many(left_out, len(before.items) - len(removed) + len(new), config.max_left_out)
    attempt = context.attempt
    attempt.put(config.ITEMS, to_parquet(parts.items_table(_first_of_each(new, before))))
    attempt.put(config.REMOVED, to_parquet(removed.sort_values("item", ignore_index=True)))
    attempt.put(config.LEFT_OUT, to_parquet(parts.left_out_table(left_out)))
    attempt.put(config.STAMPS, to_parquet(pd.DataFrame({"unit": [*stamps], "stamp": [*stamps.values()]})))
    counts = {"items": len(new), "removed": len(removed), "left_out": len(left_out), "units_read": len(changed)}
    if config.verify:
        differing = removed[removed["unit"].isin(seen)]
        attempt.put(config.DIFFERING, to_parquet(differing))
        counts["differing"] = len(differing)
    return counts


def _same(before: parts.Parts, touched: set[str]) -> set[str]:
    """Return the units of all that was left out as the same as another, if an item of ``touched`` units may go."""
    if not touched & {*before.items["unit"]}:
        return set()
    return {*before.left_out.loc[before.left_out["reason"].str.startswith(SAME), "unit"]}


def _read(context: Context[Ranks], sources: Mapping[str, Source], units: list[str], config: contracts.Index) -> Rows:
    """Return the rows of all changed units, each shard read or adopted from an earlier attempt."""
    layout: list[list[str]] = context.layout({"units": cut(units, config.units_per_shard)})["units"]
    rows: Rows = []
    for number, shard in enumerate(layout):
        context.progress("indexing", sum(map(len, layout[:number])), len(units))
        name, check = f"{contracts.RECORDS}rows/{number:05d}.json", _has(shard)
        if not context.attempt.adopt(number, check):
            with ThreadPoolExecutor(THREADS) as pool:
                made = [row for found in pool.map(lambda unit: _rows(sources, unit, config), shard) for row in found]
            context.attempt.finish(number, {name: canonical_json(made)}, check)
        rows += json.loads(context.attempt.read(name))
    context.progress("indexing", len(units), len(units))
    return rows


def _has(units: list[str]) -> Check:
    """Check that a shard holds rows of exactly these units."""

    def check(files: dict[str, bytes]) -> str | None:
        found = {row["unit"] for data in files.values() for row in json.loads(data)}
        return None if found == {*units} else "it has rows of other units"

    return check


def _rows(sources: Mapping[str, Source], unit: str, config: contracts.Index) -> Rows:
    """Return a row an item of a unit; a unit that cannot be used is one row with the reason."""
    source, name = _sources.place_of(sources, unit)
    try:
        found = [_row(source, unit, item, config) for item in source.items(name)]
    except ItemError as error:
        return [{"unit": unit, "name": name, "reason": str(error)}]
    except FileNotFoundError as error:
        raise DatasetError(f"{CHANGED} ({error})") from error
    return found or [{"unit": unit, "name": name, "reason": "no item"}]


def _row(source: Source, unit: str, item: Item, config: contracts.Index) -> dict[str, Any]:
    row: dict[str, Any] = {"unit": unit, "name": item.name, "reason": ""}
    try:
        with closing(source.open(item.name)) as file:
            facts = probe(file, item.kind)
    except ItemError as error:
        return row | {"reason": str(error)}
    text = item.caption
    row |= facts._asdict() | {"kind": item.kind, "caption": text, "metadata": canonical_json(item.metadata).decode()}
    row |= {"prompt_id": prompt_id(text) if text is not None else None}
    row["item"] = digest([facts.medium, text, row["metadata"], unit, item.name])[:32]
    return row | {"reason": "; ".join(_misfits(row, config))}


def _misfits(row: dict[str, Any], config: contracts.Index) -> Iterator[str]:
    """Yield why an item is not used, though its files are whole."""
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
    """Yield why a video may not be as long as it is."""
    if not fps:
        yield f"its frames per second are unknown, so whether it is at most {most_s:g} s long is too"
    elif frames / fps > most_s:
        yield f"{frames / fps:.2f} s, expected at most {most_s:g} s"


def _without_duplicates(rows: Rows, standing: Any, known: set[str]) -> Rows:
    """Return the rows, with a reason in each whose medium is already there under the same caption.

    ``standing`` are the items that are not read again. Of rows, those of ``known`` items come first: what is there
    stays.
    """
    first = {_key(row): _place(row) for row in standing.to_dict("records")}
    rows = sorted(rows, key=lambda row: row.get("item") not in known)
    for row in rows:
        if not row["reason"] and (other := first.setdefault(_key(row), _place(row))) != _place(row):
            row["reason"] = f"{SAME}{other}"
    return rows


def _key(row: dict[str, Any]) -> tuple[str, str]:
    return row["medium"], row["prompt_id"] if isinstance(row["prompt_id"], str) else ""


def _place(row: dict[str, Any]) -> str:
    """Return the source and the name of an item."""
    return f"{row['unit'].partition('/')[0]}/{row['name']}"


def _first_of_each(rows: Iterable[dict[str, Any]], before: parts.Parts) -> Iterator[dict[str, Any]]:
    """Add to each row whether it is the first with its medium and with its caption, over all parts."""
    media, prompts = {*before.all_items["medium"]}, {*before.all_items["prompt_id"]}
    for row in rows:
        yield row | {"new_medium": row["medium"] not in media, "new_prompt": row["prompt_id"] not in prompts}
        media.add(row["medium"])
        prompts.add(row["prompt_id"])


def _refuse_too_many(left_out: Rows, used: int, limit: float) -> None:
    left_out = [row for row in left_out if not row["reason"].startswith(SAME)]
    total = used + len(left_out)
    if len(left_out) > limit * total:
        shown = "".join(f"\n  {row['name']}: {row['reason']}" for row in left_out[:10])
        more = f"\n  and {len(left_out) - 10} more" if len(left_out) > 10 else ""
        raise DatasetError(
            f"{len(left_out)} of {total} items cannot be used, more than max_left_out = {limit:g} allows; mend or "
            f"remove them, or raise the limit:{shown}{more}"
        )
