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
from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.pipelines.weight_files import damages
from cosmos_rl_core.rewards._files import agreement
from cosmos_rl_core.rewards._vlm import rating_weights
from cosmos_rl_core.shipped import path_of
from cosmos_rl_core.storage.tensor_headers import read_header
from cosmos_rl_core.vlms import _base, _settings
from flows.running.server import named_server

DEEP = "[" * 100_000 + "]" * 100_000
WHY = "nested too deep to be read"


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
    "settings of a VLM": lambda file: _settings.json_object(str(file.parent), file.name),
    "class of a VLM": lambda file: _base.architecture(file.parent),
    "settings of a judge's weights": rating_weights.json_of,
    "agreement": lambda file: agreement.read(str(file), "judge", "v1"),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_is_nested_too_deep_is_named(tmp_path: Path, reader: str):
    (file := tmp_path / "config.json").write_text(DEEP, encoding="utf-8")
    with pytest.raises(ConfigError, match=WHY) as refused:
        READERS[reader](file)
    assert file.name in str(refused.value)


def test_a_header_of_tensors_that_is_nested_too_deep_is_damaged():
    with pytest.raises(ArtifactError, match=f"not a safetensors file: .*{WHY}"):
        read_header(io.BytesIO(struct.pack("<Q", len(DEEP)) + DEEP.encode()))


def test_a_row_that_is_nested_too_deep_is_left_out_with_the_reason(tmp_path: Path):
    folder = hf_folder.save(tmp_path / "rows", {"conversations": pa.array([DEEP])}, {})
    (row,) = hf_chat.rows(hf_chat.Options(path=str(folder)))
    assert WHY in row.reason


@pytest.mark.parametrize("name", ["model_index.json", "transformer/config.json", "tokenizer/tokenizer.json"])
def test_a_pipeline_with_a_file_that_is_nested_too_deep_is_damaged(tmp_path: Path, name: str):
    base = tmp_path / "base"
    source = path_of("package:tiny-sd3", "pipeline")
    for file in source.rglob("*"):
        if file.is_file():
            (base / file.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            (base / file.relative_to(source)).write_bytes(file.read_bytes())
    (base / name).write_text(DEEP, encoding="utf-8")
    assert [line for line in damages(str(base)) if line.startswith(f"{base / name} is damaged: ") and WHY in line]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"x = {DEEP}", "nested deeper than 32 levels"),
        ("active = ", "Invalid value"),
        ("active = 3", "expected the name of a profile"),
        ("active = 'a'\nprofiles = 3", "expected a table of profiles"),
        ("active = 'a'\n[profiles]\na = 3", "expected a table of profiles"),
    ],
    ids=["deep", "not TOML", "number", "no table", "profile without a table"],
)
def test_profiles_of_prefect_that_cannot_be_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
):
    (file := tmp_path / "profiles.toml").write_text(text, encoding="utf-8")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.delenv("PREFECT_PROFILE", raising=False)
    monkeypatch.setenv("PREFECT_PROFILES_PATH", str(file))
    with pytest.raises(ConfigError, match=why) as refused:
        named_server()
    assert str(file) in str(refused.value)
    file.write_text('active = "a"\n[profiles.a]\nPREFECT_API_URL = "http://x/api"\n[profiles.b]\n', encoding="utf-8")
    assert named_server() == "http://x/api"
    monkeypatch.setenv("PREFECT_PROFILE", "b")
    assert named_server() is None
    monkeypatch.setenv("PREFECT_PROFILE", "c")
    assert named_server() is None
