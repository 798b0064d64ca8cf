"""Differences between two files of one name, and how large they are: tensors, pictures, tables, JSON."""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pandas as pd

from cosmos_rl_core.canonical import differences, from_json
from cosmos_rl_core.storage import media, shards
from cosmos_rl_core.storage.tensor_headers import read_header
from cosmos_rl_core.weights.arrays import array
from stages.formats.tables import from_parquet

RELATIVE, LEVELS = 1e-3, 2.0
"""Tolerances under other numerics. Of numbers: a fraction of the largest one in the tensor or column. Of pixels: the
mean difference over a picture, in levels of 255."""


@dataclass(frozen=True)
class Difference:
    """One thing that differs."""

    file: str
    """Name of the file in the artifact."""
    sample: str
    """Id of the sample, member or row; "" for a file as a whole."""
    what: str
    """The tensor, column or field, and how much it differs."""
    tolerated: bool = False
    """Whether the difference is within the tolerances under other numerics."""


def of_files(name: str, old: bytes, new: bytes) -> Iterator[Difference]:
    """Yield the differences between two versions of the file ``name``, in the order of the old one."""
    for place, field, amount, tolerated in _of_kind(name)(old, new):
        yield Difference(name, place, f"{field}: {amount}", tolerated)


Found = Iterator[tuple[str, str, str, bool]]
"""Place, field, how much it differs, and whether that is tolerated."""


def _of_kind(name: str) -> Callable[[bytes, bytes], Found]:
    kinds = {".tar": _tars, ".safetensors": _tensor_files, ".parquet": _tables, ".json": _json}
    kinds |= {f".{media.IMAGE}": _pictures(media.IMAGE), f".{media.VIDEO}": _pictures(media.VIDEO)}
    return kinds.get(PurePosixPath(name).suffix, _bytes)


def _tars(old: bytes, new: bytes) -> Found:
    before, after = shards.unpack(old), shards.unpack(new)
    for name in dict.fromkeys([*before, *after]):
        sample = name.partition(".")[0]
        if name not in before or name not in after:
            yield sample, name, "only in one of the two", False
        elif before[name] != after[name]:
            found = _of_kind(name)(before[name], after[name])
            for _, field, amount, tolerated in found:
                yield sample, f"{name.rpartition('.')[2]} {field}", amount, tolerated


def _tensor_files(old: bytes, new: bytes) -> Found:
    before, after = _tensors(old), _tensors(new)
    for name in dict.fromkeys([*before, *after]):
        if name not in before or name not in after or before[name].shape != after[name].shape:
            yield "", name, "of another shape, or only in one of the two", False
        else:
            yield from (("", name, *amount) for amount in _numbers(before[name], after[name]))


def _tensors(data: bytes) -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file."""
    return {one.name: array(data[one.start : one.end], one.dtype, one.shape) for one in read_header(io.BytesIO(data))}


def _numbers(old: np.ndarray, new: np.ndarray) -> Iterator[tuple[str, bool]]:
    """Yield how much two arrays differ, and whether that is tolerated; nothing if their bytes are equal."""
    if old.tobytes() == new.tobytes():
        return
    before, after = old.astype("float64"), new.astype("float64")
    if not np.array_equal(np.isfinite(before), np.isfinite(after)):
        yield "other values are not finite", False
        return
    gaps = np.abs(before - after)[np.isfinite(before)]
    largest, scale = float(gaps.max(initial=0.0)), float(np.abs(before[np.isfinite(before)]).max(initial=0.0))
    yield f"{int((gaps > 0).sum())} of {before.size} differ, by up to {largest:.3g}", largest <= RELATIVE * scale


def _pictures(extension: str) -> Callable[[bytes, bytes], Found]:
    def compare(old: bytes, new: bytes) -> Found:
        before, after = (media.decode(extension, data).astype("int16") for data in (old, new))
        if before.shape != after.shape:
            yield "", "pixels", f"{list(before.shape)} -> {list(after.shape)}", False
            return
        gaps = np.abs(before - after)
        amount = f"{int((gaps > 0).sum())} of {gaps.size} differ, by up to {int(gaps.max())} levels"
        yield "", "pixels", amount, float(gaps.mean()) <= LEVELS

    return compare


def _tables(old: bytes, new: bytes) -> Found:
    before, after = (from_parquet(data) for data in (old, new))
    if len(before) != len(after) or list(before.columns) != list(after.columns):
        yield "", "table", f"{before.shape} -> {after.shape} rows and columns, or other names", False
        return
    rows = before["sample_id"] if "sample_id" in before.columns else before.index.to_series()
    for column in before.columns:
        yield from _columns(str(column), before[column], after[column], rows)


def _columns(name: str, old: Any, new: Any, rows: Any) -> Found:
    differ = ~(old.eq(new) | (old.isna() & new.isna())).to_numpy(bool)
    if not differ.any():
        return
    place = str(rows.to_numpy()[differ][0])
    if pd.api.types.is_numeric_dtype(old) and not pd.api.types.is_bool_dtype(old):
        yield from ((place, name, *found) for found in _numbers(old.to_numpy("float64"), new.to_numpy("float64")))
    else:
        first = f"{old.to_numpy()[differ][0]!r} -> {new.to_numpy()[differ][0]!r}"
        yield place, name, f"{int(differ.sum())} of {len(differ)} rows differ, first {first}", False


def _json(old: bytes, new: bytes) -> Found:
    before, after = from_json(old), from_json(new)
    if isinstance(before, list) and isinstance(after, list):
        before, after = ({str(number): one for number, one in enumerate(some)} for some in (before, after))
    for line in differences(before, after)[:1]:
        field, _, amount = line.partition(": ")
        yield "", field, amount, False


def _bytes(old: bytes, new: bytes) -> Found:
    shorter = min(len(old), len(new))
    first = next((i for i in range(shorter) if old[i] != new[i]), shorter)
    yield "", "bytes", f"{len(old)} -> {len(new)} bytes, from byte {first} on", False
