"""Arrow files in the streaming format: one record batch in memory at a time, and the places of values in the file."""

import io
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from cosmos_rl_core.datasets._base import ItemError
from cosmos_rl_core.storage import store


class Batch:
    """A record batch: consecutive rows of a file."""

    def __init__(self, message: pa.Message, schema: pa.Schema, start: int) -> None:
        self.rows: pa.RecordBatch = pa.ipc.read_record_batch(message, schema)
        self.rows.validate(full=True)
        self._body, self._start = message.body, start

    def places(self, column: str) -> list[tuple[int, int] | None]:
        """Return the offsets in the file at which the ``bytes`` of each row begin and end; None for a row without.

        ``column`` is a struct with a binary field ``bytes``. Raises :class:`ItemError` if the file is compressed.
        """
        values: Any = self.rows.column(column)
        # Flattened, so that the bytes of a null struct are null.
        return self.ranges(values.flatten()[values.type.get_field_index("bytes")])

    def lists(self, column: str) -> list[list[tuple[int, int] | None]]:
        """Return the same offsets for all pictures of each row; None for a picture without bytes.

        ``column`` is as in :meth:`places`, or has lists of such structs. A row that is null has no picture.
        """
        values: Any = self.rows.column(column)
        if pa.types.is_struct(values.type):
            there = values.is_valid().to_pylist()
            return [[place] if valid else [] for place, valid in zip(self.places(column), there, strict=True)]
        inner = values.values
        places = self.ranges(inner.flatten()[inner.type.get_field_index("bytes")])
        ends = values.offsets.to_pylist()
        rows = zip(ends[:-1], ends[1:], values.is_valid().to_pylist(), strict=True)
        return [places[start:end] if valid else [] for start, end, valid in rows]

    def ranges(self, found: Any) -> list[tuple[int, int] | None]:
        """Return the offsets in the file at which each value of a binary array begins and ends; None for null.

        The array is a column, or a part of one. Raises :class:`ItemError` if the file is compressed.
        """
        _, offsets, data = found.buffers()
        if data is None or not len(found):
            return [None] * len(found)
        # Empty values may lie anywhere.
        first = data.address - self._body.address if data.size else 0
        if not 0 <= first <= self._body.size - data.size:
            raise ItemError("its batches are compressed; save the dataset without compression")
        width = np.int64 if pa.types.is_large_binary(found.type) else np.int32
        ends = np.frombuffer(offsets, dtype=width)[found.offset : found.offset + len(found) + 1] + self._start + first
        pairs = zip(ends[:-1].tolist(), ends[1:].tolist(), found.is_valid().to_pylist(), strict=True)
        return [(start, end) if valid else None for start, end, valid in pairs]


def schema_of(url: str) -> pa.Schema:
    """Return the schema of a file. Raises like :func:`batches`."""
    with closing(store.stream(url)) as file:
        whole = _Whole(file, store.size(url) or 0)
        with _damage(whole):
            schema, _ = _begin(whole)
            return schema


def batches(url: str) -> Iterator[Batch]:
    """Yield the record batches of a file.

    Raises :class:`ItemError` if the file is damaged. Errors of the store pass unchanged.
    """
    with closing(store.stream(url)) as file:
        whole = _Whole(file, store.size(url) or 0)
        with _damage(whole):
            schema, messages = _begin(whole)
            for message in messages:
                yield Batch(message, schema, whole.position - message.body.size)


def _begin(whole: "_Whole") -> tuple[pa.Schema, Iterator[pa.Message]]:
    messages = iter(pa.ipc.MessageReader.open_stream(pa.PythonFile(whole, mode="r")))
    first = next(messages, None)
    if first is None:
        raise ItemError("it has no schema")
    return pa.ipc.read_schema(first), messages


@contextmanager
def _damage(whole: "_Whole") -> Iterator[None]:
    """Turn errors of pyarrow, also plain ``OSError``, into :class:`ItemError`."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if whole.failed:
            raise
        raise ItemError(f"cannot be read: {' '.join(str(error).split())}") from error


class _Whole(io.RawIOBase):
    """A file whose every read must be complete: a file that ends early is damaged, even if it ends between batches."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self.position = 0
        self.failed = False
        """Whether reading from the store failed."""

    def readable(self) -> bool:
        """Return True, which pyarrow requires."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Return the next ``size`` bytes. Raises :class:`ItemError` if the file has fewer."""
        if not 0 <= size <= self._size - self.position:
            raise ItemError("it ends early: it was not written to its end, or is no Arrow stream")
        self.failed = True
        data = self._file.read(size)
        self.failed = False
        if len(data) < size:
            raise ItemError("it ended early while it was read")
        self.position += size
        return data
