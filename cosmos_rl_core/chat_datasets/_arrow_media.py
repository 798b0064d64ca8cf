"""Media that are bytes in Arrow files, as ``datasets`` stores an ``Image`` or a ``Video``."""

import re
from collections.abc import Iterator
from io import BytesIO
from typing import Any, BinaryIO

import pyarrow as pa

from cosmos_rl_core.chat_datasets._base import MEDIA
from cosmos_rl_core.datasets._arrow_files import Batch
from cosmos_rl_core.datasets._base import ItemError
from cosmos_rl_core.storage import store

_INSIDE = re.compile(r"(?P<file>.+\.arrow)#(?P<start>\d+)-(?P<end>\d+)")
Place = tuple[int, int] | None


class Columns:
    """The media in a row's columns of media, and a record of the media that parts of its messages have taken."""

    def __init__(self, names: dict[str, list[str]]) -> None:
        self._names = names
        self._taken: dict[str, set[int]] = {kind: set() for kind in names}

    def filled(self, part: Any) -> Any:
        """Return a part of a message with a medium: its own, or the column's at its ``index``, or the next one.

        Raises :class:`ItemError` if there is no such medium.
        """
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in MEDIA or part.get(kind) is not None:
            return part
        names, taken, index = self._names[kind], self._taken[kind], part.get("index")
        if not names and index is None:
            return part
        at = index if index is not None else next((n for n in range(len(names)) if n not in taken), len(names))
        if not isinstance(at, int) or not 0 <= at < len(names):
            raise ItemError(f"a part of type {kind!r} without a medium; the columns of the row have {len(names)}")
        taken.add(at)
        return {"type": kind, kind: names[at]}

    @property
    def spare(self) -> int:
        """Return the number of media that no part has taken."""
        return sum(len(names) - len(self._taken[kind]) for kind, names in self._names.items())


def opened(root: str, name: str) -> BinaryIO | None:
    """Open a medium inside an Arrow file below ``root``; return None if ``name`` is a file of its own."""
    found = _INSIDE.fullmatch(name)
    if found is None:
        return None
    start, end = int(found["start"]), int(found["end"])
    return BytesIO(store.read(store.join(root, found["file"]), start, end) if end > start else b"")


def conversations(batch: Batch, column: str, file: str) -> Iterator[tuple[Any, Columns]]:
    """Yield the messages of each row, with names in place of their media, and the media in its other columns.

    ``file`` is the name of the file below the root of the dataset. Raises :class:`ItemError` if it is compressed.
    """
    values = batch.rows.column(column)
    places = {kind: iter(_nested(batch, values, "content", kind)) for kind in MEDIA}
    others = {kind: _in_columns(batch, kind, file, column) for kind in MEDIA}
    for number, messages in enumerate(values.to_pylist()):
        for part in _parts(messages):
            for kind in MEDIA:
                place = next(places[kind], None)
                if isinstance(part, dict) and isinstance(medium := part.get(kind), dict):
                    part[kind] = _name(medium, place, file)
        yield messages, Columns({kind: others[kind][number] for kind in MEDIA})


def _parts(messages: Any) -> Iterator[Any]:
    """Yield the parts of messages, in the order of :func:`_nested`."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        yield from content if isinstance(content, list) else ()


def _in_columns(batch: Batch, kind: str, file: str, messages: str) -> list[list[str]]:
    """Return the names of each row's media in the columns ``image`` and ``images``, or ``video`` and ``videos``."""
    names: list[list[str]] = [[] for _ in range(batch.rows.num_rows)]
    for column in (kind, f"{kind}s"):
        if column == messages or column not in batch.rows.schema.names:
            continue
        values = batch.rows.column(column)
        if _is_text(values.type) or (_is_list(values.type) and _is_text(values.type.value_type)):
            for number, found in enumerate(values.to_pylist()):
                names[number] += [path for path in (found if isinstance(found, list) else [found]) if path is not None]
            continue
        if not _is_medium(values.type) and not (_is_list(values.type) and _is_medium(values.type.value_type)):
            continue
        places = iter(_nested(batch, values))
        for number, found in enumerate(values.to_pylist()):
            # A null list has no place; a null medium has one.
            media = found if isinstance(found, list) else [] if _is_list(values.type) else [found]
            here = [(medium, next(places)) for medium in media]
            names[number] += [_name(medium, place, file) for medium, place in here if medium is not None]
    return names


def _is_text(kind: Any) -> bool:
    """Return whether values are texts: paths of media."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _name(medium: dict[str, Any], place: Place, file: str) -> str:
    """Return a name for a medium: file and range of its bytes, or its path if it has no bytes."""
    if place is not None:
        return f"{file}#{place[0]}-{place[1]}"
    path = medium.get("path")
    return path if isinstance(path, str) else ""


def _nested(batch: Batch, values: Any, *fields: str) -> list[Place]:
    """Return the place of each ``bytes`` value below lists and ``fields``, in order; [] if the type has no such field.

    Lists that are null have no elements.
    """
    names = [*fields, "bytes"]
    while True:
        if _is_list(values.type):
            values = values.flatten()
        elif not names:
            is_bytes = pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type)
            return batch.ranges(values) if is_bytes else []
        elif pa.types.is_struct(values.type) and (at := values.type.get_field_index(names.pop(0))) >= 0:
            values = values.flatten()[at]
        else:
            return []


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _is_medium(kind: pa.DataType) -> bool:
    return pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
