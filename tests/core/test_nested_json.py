"""JSON and TOML of others that is nested without end: each reader ends with an error of its own, never a traceback."""

import io
import json
import struct
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from cosmos_rl_core.canonical import from_json
from cosmos_rl_core.chat_datasets import hf_chat, llava
from cosmos_rl_core.conformance.kinds import hf_folder
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.rewards._files import agreement
from cosmos_rl_core.storage.tensor_headers import read_header
from tests.nested import DEEP, WHY, require_named


def test_values_equal_the_standard_librarys():
    assert from_json(b'{"a": [1, 2.5, null, true, "\xc3\xa9"]}') == {"a": [1, 2.5, None, True, "é"]}
    with pytest.raises(json.JSONDecodeError):
        from_json("{")


def test_json_that_is_nested_too_deep_is_a_wrong_value():
    for text in (DEEP, DEEP.encode(), '{"a":' * 100_000):
        with pytest.raises(ValueError, match=WHY):
            from_json(text)


READERS: dict[str, Callable[[Path], object]] = {
    "llava": lambda file: list(llava.rows(llava.Options(annotation_path=str(file)))),
    "file of a pipeline": lambda file: directories.read_json(file.parent, file.name),
    "agreement": lambda file: agreement.read(str(file), "judge", "v1"),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_is_nested_too_deep_is_named(tmp_path: Path, reader: str):
    require_named(tmp_path, READERS[reader])


def test_a_header_of_tensors_that_is_nested_too_deep_is_damaged():
    with pytest.raises(ArtifactError, match=f"not a safetensors file: .*{WHY}"):
        read_header(io.BytesIO(struct.pack("<Q", len(DEEP)) + DEEP.encode()))


def test_a_row_that_is_nested_too_deep_is_left_out_with_the_reason(tmp_path: Path):
    folder = hf_folder.save(tmp_path / "rows", {"conversations": pa.array([DEEP])}, {})
    (row,) = hf_chat.rows(hf_chat.Options(path=str(folder)))
    assert WHY in row.reason
