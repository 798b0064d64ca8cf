"""Files of the base model that are cut short, missing or damaged, of every component."""

import json
import os
import shutil
import struct
from pathlib import Path

import pytest

from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.pipelines.weight_files import damages
from cosmos_rl_core.shipped import path_of
from tests.nested import DEEP, WHY

WEIGHTS = [
    "transformer/diffusion_pytorch_model.safetensors",
    "vae/diffusion_pytorch_model.safetensors",
    "text_encoder/model.safetensors",
    "text_encoder_2/model.safetensors",
    "text_encoder_3/model.safetensors",
]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return Path(shutil.copytree(directories.resolve_path("package:tiny-sd3"), tmp_path / "base"))


def split(base: Path, file: str) -> Path:
    """Replace a component's weights by two shards and an index; returns the index."""
    whole = base / file
    length = struct.unpack("<Q", whole.read_bytes()[:8])[0]
    header = json.loads(whole.read_bytes()[8 : 8 + length])
    header.pop("__metadata__", None)
    places = {name: f"{whole.stem}-{1 + i % 2:05d}-of-00002.safetensors" for i, name in enumerate(header)}
    for shard in set(places.values()):
        names = [name for name in header if places[name] == shard]
        data, entries = b"", {}
        for name in names:
            start, end = header[name]["data_offsets"]
            part = whole.read_bytes()[8 + length + start : 8 + length + end]
            entries[name] = header[name] | {"data_offsets": [len(data), len(data) + len(part)]}
            data += part
        encoded = json.dumps(entries).encode()
        (whole.parent / shard).write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    index = whole.parent / f"{whole.name}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")
    whole.unlink()
    return index


@pytest.mark.parametrize("name", ["wan", "sana", "cosmos_predict2_5", "flux", "qwen_image"])
def test_every_component_of_every_family_is_looked_at(name: str, tmp_path: Path):
    base = tiny_pipelines.save(name, tmp_path / "base")
    assert damages(str(base)) == []
    weights = sorted(base.rglob("*.safetensors"))
    for file in weights:
        os.truncate(file, file.stat().st_size - 1)
    assert sorted(line.partition(" ")[0] for line in damages(str(base))) == [str(file) for file in weights]


def test_all_damaged_files_are_named_at_once(base: Path):
    (base / WEIGHTS[0]).write_bytes(b"")
    (base / WEIGHTS[1]).write_bytes(b"<html>not found</html>")
    (base / WEIGHTS[2]).unlink()
    os.truncate(base / WEIGHTS[3], 100)
    with (base / WEIGHTS[4]).open("ab") as file:
        file.write(b"more")
    shutil.rmtree(base / "tokenizer")
    (base / "tokenizer_2" / "tokenizer.json").unlink()
    (base / "scheduler" / "scheduler_config.json").write_text("{", encoding="utf-8")
    (base / "vae" / "config.json").unlink()
    found = damages(str(base))
    for file, what in {
        WEIGHTS[0]: "is empty",
        WEIGHTS[1]: "is damaged: not a safetensors file",
        WEIGHTS[2]: "is missing; weights are read from that file, or from the files of model.safetensors.index.json",
        WEIGHTS[3]: "is damaged: not a safetensors file",
        WEIGHTS[4]: "is damaged: it has 4 bytes more than its header says",
        "tokenizer": "is missing, and model_index.json lists it as a CLIPTokenizer",
        "tokenizer_2": "has no vocabulary; expected one of tokenizer.json",
        "scheduler/scheduler_config.json": "is damaged: it is not JSON",
        "vae/config.json": "is missing",
    }.items():
        assert any(line.startswith(f"{base / file} {what}") for line in found), file
    assert len(found) == 9


@pytest.mark.parametrize("file", [WEIGHTS[0], WEIGHTS[4]])
def test_an_index_that_does_not_match_its_shards_is_damage(file: str, base: Path):
    index = split(base, file)
    assert damages(str(base)) == []
    places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    first, second = sorted(set(places.values()))
    moved = next(name for name, place in places.items() if place == second)
    index.write_text(
        json.dumps({"weight_map": places | {moved: first, "lost": "nosuch.safetensors"}}), encoding="utf-8"
    )
    assert damages(str(base)) == [
        f"{index.parent / first} lacks 1 tensors that the index names, e.g. {moved}",
        f"{index.parent / 'nosuch.safetensors'} is missing, and {index.name} names it",
    ]
    index.write_text("[]", encoding="utf-8")
    assert damages(str(base)) == [f"{index} is damaged: expected a JSON object with entries"]
    index.write_text('{"weight_map": {}}', encoding="utf-8")
    assert damages(str(base)) == [f"{index} is damaged: it has no weight_map, which names the file of each tensor"]


@pytest.mark.parametrize("absolute", [True, False])
def test_an_index_names_no_file_outside_its_folder(absolute: bool, base: Path):
    index = split(base, WEIGHTS[0])
    places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    outside = str(base / WEIGHTS[1]) if absolute else f"../{WEIGHTS[1]}"
    index.write_text(json.dumps({"weight_map": places | {"lost": outside}}), encoding="utf-8")
    assert damages(str(base)) == [f"{index} is damaged: it names {outside}, which is outside its folder"]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_every_json_file_of_a_tokenizer_parses(name: str, base: Path):
    file = base / "tokenizer_3" / name
    file.write_text('{"model": {"vocab": ', encoding="utf-8")
    (line,) = damages(str(base))
    assert line.startswith(f"{file} is damaged: it is not JSON (")


def test_json_files_that_are_not_of_a_tokenizer_itself_may_hold_other_values(base: Path):
    (base / "tokenizer" / "notes.json").write_text("[]", encoding="utf-8")
    (base / "tokenizer" / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert damages(str(base)) == [
        f"{base / 'tokenizer/tokenizer.json'} is damaged: expected a JSON object with entries"
    ]


@pytest.mark.parametrize("name", ["spiece.model", "tokenizer.model", "vocab.txt", "merges.txt"])
def test_vocabularies_are_not_empty(name: str, base: Path):
    (base / "tokenizer" / name).write_bytes(b"")
    assert damages(str(base)) == [f"{base / 'tokenizer' / name} is empty"]


def test_a_clip_tokenizer_by_vocabulary_has_its_merges_too(base: Path):
    tokenizer = base / "tokenizer"
    model = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (tokenizer / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    assert damages(str(base)) == []
    (tokenizer / "tokenizer.json").unlink()
    lost = f"{tokenizer / 'merges.txt'} is missing, and a CLIPTokenizer reads it together with vocab.json"
    assert damages(str(base)) == [lost]
    (tokenizer / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    assert damages(str(base)) == []


@pytest.mark.parametrize(
    "file",
    [
        *WEIGHTS,
        directories.INDEX,
        "vae/config.json",
        "scheduler/scheduler_config.json",
        "tokenizer/tokenizer.json",
        "tokenizer_3/tokenizer_config.json",
        "tokenizer_3/spiece.model",
    ],
)
def test_files_that_git_lfs_has_not_fetched_are_called_so(file: str, base: Path):
    (base / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 34\n", encoding="utf-8")
    wrong = "it is a pointer of git-lfs, which has not fetched the file: git lfs pull"
    assert damages(str(base)) == [f"{base / file} is damaged: {wrong}"]


def test_a_link_that_leads_nowhere_is_a_missing_file(base: Path):
    for file in (WEIGHTS[2], "tokenizer_3/notes.txt"):
        (base / file).unlink(missing_ok=True)
        (base / file).symlink_to("../../blobs/123")
    weights, notes = damages(str(base))
    assert weights.startswith(f"{base / WEIGHTS[2]} is missing (a link to ../../blobs/123, which is not there);")
    assert notes == f"{base / 'tokenizer_3/notes.txt'} is missing (a link to ../../blobs/123, which is not there)"


def test_files_that_are_absent_on_purpose_or_not_loaded_are_no_damage(base: Path):
    index = json.loads((base / directories.INDEX).read_text(encoding="utf-8"))
    assert index["image_encoder"] == [None, None]
    shutil.rmtree(base / "text_encoder_3")
    absent = {"text_encoder_3": [None, None], "safety_checker": ["cosmos_guardrail", "CosmosSafetyChecker"]}
    (base / directories.INDEX).write_text(json.dumps(index | absent), encoding="utf-8")
    (base / "transformer" / "diffusion_pytorch_model.fp16.safetensors").write_bytes(b"")
    assert damages(str(base)) == []


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
