"""Pages that show a snapshot of a dataset to people: media, captions, sizes, and the items that were left out."""

import base64
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import TypeAdapter, ValidationError

from cosmos_rl_core.config.train import AnyDataset
from cosmos_rl_core.datasets import _sources
from cosmos_rl_core.datasets._base import ItemError, Source
from cosmos_rl_core.datasets._pictures import pictures
from cosmos_rl_core.datasets._reference_pixels import decoded
from cosmos_rl_core.errors import ConfigError, DatasetError, unwritten
from cosmos_rl_core.storage.media import encode
from flows.terminal.commands import about
from stages.artifacts import snapshots
from stages.artifacts.artifact import Artifact
from stages.artifacts.snapshots import Snapshot
from stages.formats.parts import Parts, references_in
from stages.formats.references import Pictures
from stages.reporting.page import shown

MAX_SIDE = 256
"""Largest number of pixels on the longer side of a picture. A page of 100 images has about 2 MB."""
FRAMES = 3
"""Frames shown of a video."""
THREADS = 4
_SNAPSHOT = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]*)(?:@([1-9][0-9]{0,8}))?")


@dataclass(frozen=True)
class Shown:
    """Pages of a snapshot."""

    dataset: str
    snapshot: int
    facts: list[str]
    """Numbers of items, media, captions and sizes, in words."""
    items: int
    left_out: int
    pages: list[str]
    """Files that were written, in order."""
    items_a_page: int

    def lines(self) -> Iterator[str]:
        """Yield the lines to print."""
        yield from self.facts
        to = min(self.items_a_page, self.items)
        yield f"{self.pages[0]}: items 1 to {to} of {self.items}" if self.items else self.pages[0]
        if len(self.pages) > 1:
            yield f"{len(self.pages)} pages of {self.items_a_page} items"
        elif self.items > self.items_a_page:
            yield "--all writes pages of the others"


def show(store_url: str, name: str, output: str | None, first: int, *, all_pages: bool) -> Shown:
    """Write ``1.html`` with the first ``first`` items; with ``all_pages`` also further pages of as many items.

    Media are read from their places when the snapshot was made; a page says which of them are gone.
    Raises :class:`ConfigError` if there is no such snapshot, or a page cannot be written.
    """
    snapshot = find(store_url, name)
    parts = Parts([Artifact(part) for part in snapshot.parts], [Artifact(one) for one in snapshot.captions])
    rows: list[dict[str, Any]] = parts.items.to_dict("records")
    title = f"{snapshot.dataset}@{snapshot.number}"
    folder = Path(output or title)
    sources, away = _listed(snapshot)
    kept = Pictures(snapshots.root_of(store_url, snapshot.dataset))
    starts = list(range(0, len(rows), first) if all_pages else range(1)) or [0]
    for page, start in enumerate(starts):
        values = {
            "title": title,
            "facts": _facts(snapshot, parts),
            "total": len(rows),
            "start": start,
            "items": _items(sources, rows[start : start + first], away, kept),
            "links": _links(page, len(starts)),
            "left_out": parts.left_out.to_dict("records")[: None if all_pages else first] if page == 0 else [],
            "left_out_total": len(parts.left_out) if page == 0 else 0,
        }
        _write(folder / _file(page), _template().render(values))
    pages = [str(folder / _file(page)) for page in range(len(starts))]
    left_out = len(parts.left_out)
    return Shown(snapshot.dataset, snapshot.number, _facts(snapshot, parts), len(rows), left_out, pages, first)


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritten(file, error) from error


def find(store_url: str, name: str) -> Snapshot:
    """Return the snapshot ``NAME@NUMBER``, or the newest of ``NAME``. Raises :class:`ConfigError` if there is none."""
    match = _SNAPSHOT.fullmatch(name)
    if match is None:
        raise ConfigError(f"{name!r} names no snapshot; expected NAME or NAME@NUMBER")
    dataset, number = match.groups()
    newest = snapshots.newest(store_url, dataset)
    if newest is None:
        known = ", ".join(sorted(snapshots.names(store_url))) or "none"
        make = about(store_url, "preprocess", "FILE")
        raise ConfigError(
            f"no dataset {dataset!r} in {store_url}, known: {known}; `{make}` makes one from its settings"
        )
    found = newest if number is None else Snapshot.read(store_url, dataset, int(number))
    if found is None:
        raise ConfigError(f"{dataset} has no snapshot {number}; its newest is {newest.number}")
    return found


def _listed(snapshot: Snapshot) -> tuple[dict[str, Source], str]:
    """Return the sources by name, with their files listed, and ``""``; or no sources, and why they cannot be listed."""
    try:
        options = {name: TypeAdapter(AnyDataset).validate_python(one) for name, one in snapshot.sources.items()}
        sources = {name: _sources.source_of(one) for name, one in options.items()}
        _sources.stamps(sources)
    except ValidationError as error:
        return {}, error.errors()[0]["msg"]
    except ConfigError as error:
        return {}, str(error)
    return sources, ""


def _facts(snapshot: Snapshot, parts: Parts) -> list[str]:
    items = parts.items
    sizes = items[["height", "width"]].drop_duplicates()
    found = [
        f"{len(items)} items in {len(snapshot.parts)} parts",
        f"{items['medium'].nunique()} media",
        f"{items['prompt_id'].nunique()} captions",
        f"{int(items['captioner'].notna().sum())} items captioned by a captioner",
        f"{len(parts.left_out)} left out",
    ]
    if len(items):
        height, width = items["height"], items["width"]
        span = f"{height.min()} x {width.min()} to {height.max()} x {width.max()} pixels"
        found.append(f"{len(sizes)} sizes, {span}, {items['frames'].min()} to {items['frames'].max()} frames")
    return found


def _items(
    sources: Mapping[str, Source], rows: list[dict[str, Any]], away: str, kept: Pictures
) -> list[dict[str, Any]]:
    """Return, for each item, the values that its page shows."""
    with ThreadPoolExecutor(THREADS) as pool:
        shown = list(pool.map(lambda row: ([], away) if away else _pictures(sources, row), rows))
        references = list(pool.map(lambda row: _references(kept, row), rows))
    found = zip(rows, shown, references, strict=True)
    return [_item(row, *picture) | {"references": some} for row, picture, some in found]


def _references(kept: Pictures, row: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the name of each reference of an item, and the picture as a data URI; "" for one that cannot be read."""
    found: list[tuple[str, str]] = []
    for number, one in enumerate(references_in(row["references"]), 1):
        data, fault = kept.looked_at(one.digest)
        if fault:
            found.append((f"reference {number} is {fault}", ""))
            continue
        # Of a clip, the last frame, from which a video continues.
        (picture,) = pictures(BytesIO(encode(decoded(data)[-1:])[1]), "image", 1, num_frames=1, max_side=MAX_SIDE)
        found.append((f"reference {number}", _uri(picture)))
    return found


def _uri(picture: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(picture).decode()}"


def _item(row: dict[str, Any], found: list[str], missing: str) -> dict[str, Any]:
    frames = f", {row['frames']} frames, {row['fps']:g} fps" if row["kind"] == "video" else ""
    text, captioner = (row[name] if isinstance(row[name], str) else "" for name in ("caption", "captioner"))
    size = f"{row['height']} x {row['width']}{frames}"
    about = {"name": row["name"], "caption": text, "captioner": captioner, "size": size}
    return about | {"pictures": found, "missing": missing}


def _pictures(sources: Mapping[str, Source], row: dict[str, Any]) -> tuple[list[str], str]:
    """Return pictures of a medium as data URIs, and ``""``; or no pictures, and the reason."""
    try:
        with closing(_sources.opened(sources, row["unit"], row["name"], row["medium"])) as file:
            found = pictures(file, row["kind"], row["frames"], num_frames=FRAMES, max_side=MAX_SIDE)
    except (DatasetError, ItemError) as error:
        return [], str(error)
    return [_uri(one) for one in found], ""


def _template() -> Any:
    loader = PackageLoader("stages.reporting")
    environment = Environment(
        loader=loader, autoescape=True, finalize=shown, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("dataset.html")


def _file(page: int) -> str:
    return f"{page + 1}.html"


def _links(page: int, pages: int) -> list[tuple[str, str]]:
    there = [("previous", page - 1), ("next", page + 1)]
    return [(word, _file(to)) for word, to in there if 0 <= to < pages]
