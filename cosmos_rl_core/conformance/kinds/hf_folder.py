"""Folders in the layout that ``save_to_disk`` of Hugging Face's ``datasets`` writes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

MEDIUM = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""How `datasets` stores an image or a video."""


def save(
    folder: Path,
    columns: dict[str, pa.Array],
    features: dict[str, Any],
    files: int = 1,
    rows_per_batch: int = 2,
    **writing: Any,
) -> Path:
    """Write a ``Dataset``; return its folder. ``writing`` goes to the Arrow writer."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = len(next(iter(columns.values())))
    described = {
        name: features.get(name, {"dtype": str(array.type), "_type": "Value"}) for name, array in columns.items()
    }
    metadata = {"huggingface": json.dumps({"info": {"features": described}})}
    schema = pa.schema([(name, array.type) for name, array in columns.items()], metadata=metadata)
    names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
    for number, name in enumerate(names):
        begin, end = rows * number // files, rows * (number + 1) // files
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, schema, **writing) as stream:
            for at in range(begin, end, rows_per_batch):
                part = [array.slice(at, min(rows_per_batch, end - at)) for array in columns.values()]
                stream.write_batch(pa.record_batch(part, schema=schema))
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "0123456789abcdef",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    about = {"citation": "", "description": "", "features": described, "homepage": "", "license": ""}
    (folder / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
    (folder / "dataset_info.json").write_text(json.dumps(about, indent=2), encoding="utf-8")
    return folder


def save_splits(folder: Path, **splits: dict[str, pa.Array]) -> Path:
    """Write a ``DatasetDict`` of columns without media; return its folder."""
    for name, columns in splits.items():
        save(folder / name, columns, {})
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": [*splits]}), encoding="utf-8")
    return folder


def media(values: Sequence[bytes | None]) -> pa.Array:
    """Return a column of media, given their bytes; None makes a row with a path and no bytes."""
    return pa.array([{"bytes": value, "path": "a.png"} for value in values], MEDIUM)
