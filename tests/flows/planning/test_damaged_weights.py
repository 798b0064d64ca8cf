"""Plans find files of the base model that are cut short, missing or damaged, of every component, and name them all."""

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from cosmos_rl_core import plugins
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.conformance.models.adapters import load_model
from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.models import _loading
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.pipelines.weight_files import damages
from flows.cli import app as cli
from flows.planning.plan import Settings, plan_of
from stages.contracts import ModelRef
from stages.training.loading import load_stock

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


@pytest.mark.parametrize("file", WEIGHTS)
def test_truncated_weights_end_a_plan_with_65_and_the_number_of_missing_bytes(file: str, base: Path, recipe):
    size = (base / file).stat().st_size
    os.truncate(base / file, size - 1000)
    said = CliRunner().invoke(cli.app, ["plan", recipe(), "--set", f"policy.model_name_or_path={base}"])
    assert said.exit_code == 65
    assert f"{base / file} is cut short: 1000 of {size} bytes are missing" in said.stderr
    assert "fetch the model again" in said.stderr


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


@pytest.mark.parametrize("name", ["transformer", "vae", "scheduler", "text_encoder", "tokenizer", "tokenizer_3"])
@pytest.mark.parametrize("null", [True, False])
def test_a_pipeline_lists_every_component_that_it_needs(name: str, null: bool, base: Path, recipe):
    file = base / directories.INDEX
    index = json.loads(file.read_text(encoding="utf-8"))
    del index[name]
    file.write_text(json.dumps(index | ({name: [None, None]} if null else {})), encoding="utf-8")
    assert damages(str(base)) == [f"{file} is damaged: it lists no {name}"]
    with pytest.raises(ArtifactError, match=f"it lists no {name}"):
        plan_of(Settings(recipe(), overrides=(f"policy.model_name_or_path={base}",)))


@pytest.mark.parametrize(
    ("text", "what"), [("{", "it is not JSON"), ("[]", "expected a JSON object"), ('{"a": 1}', "it has no _class_name")]
)
def test_a_damaged_list_of_components_ends_a_plan_with_65(text: str, what: str, base: Path, recipe):
    (base / directories.INDEX).write_text(text, encoding="utf-8")
    said = CliRunner().invoke(cli.app, ["plan", recipe(), "--set", f"policy.model_name_or_path={base}"])
    assert said.exit_code == 65
    assert f"{base / directories.INDEX} is damaged: {what}" in said.stderr


@pytest.mark.parametrize(
    "file", [*(f"{Path(weights).parent}/config.json" for weights in WEIGHTS), "scheduler/scheduler_config.json"]
)
def test_damaged_settings_of_a_component_end_a_plan_with_65(file: str, base: Path, recipe):
    os.truncate(base / file, 20)
    said = CliRunner().invoke(cli.app, ["plan", recipe(), "--set", f"policy.model_name_or_path={base}"])
    assert said.exit_code == 65
    assert f"{base / file} is damaged: it is not JSON" in said.stderr


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


def test_weights_of_another_format_are_named(base: Path, recipe):
    (base / WEIGHTS[1]).rename(base / "vae" / "diffusion_pytorch_model.bin")
    with pytest.raises(ArtifactError, match=r"vae/diffusion_pytorch_model\.safetensors is missing; there is") as error:
        plan_of(Settings(recipe(), overrides=(f"policy.model_name_or_path={base}",)))
    assert "there is diffusion_pytorch_model.bin, which is not read" in str(error.value)


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


def test_damage_is_reported_with_mistakes_in_the_recipe(base: Path, recipe):
    os.truncate(base / WEIGHTS[0], (base / WEIGHTS[0]).stat().st_size - 1)
    with pytest.raises(ConfigError) as error:
        plan_of(
            Settings(recipe(), overrides=(f"policy.model_name_or_path={base}", "train.train_batch_per_replica=4000"))
        )
    assert "one iteration needs 1000 prompts, the dataset 'ocr' has 4; add prompts" in str(error.value)
    assert f"{base / WEIGHTS[0]} is cut short" in str(error.value)


def change_weights(file: Path, change) -> None:
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def load_all(base: Path) -> None:
    load_model(base, ("transformer", "vae", "text"), torch.device("cpu"))


def load_whole_stock(base: Path) -> None:
    ref = ModelRef(path=str(base), adapter=directories.adapter_name(base), digest="")
    load_stock(ref, str(base), "float32", torch.device("cpu"))


@pytest.mark.parametrize("name", plugins.known("models"))
def test_weights_that_an_intact_file_lacks_are_an_error_and_never_made_up(name: str, tmp_path: Path):
    base = tiny_pipelines.save(name, tmp_path / "base")
    for load in (load_all, load_whole_stock):
        load(base)
        for file in sorted(base.rglob("*.safetensors")):
            whole = file.read_bytes()
            lost = min(load_file(file))
            change_weights(file, lambda weights, lost=lost: weights.pop(lost))
            with pytest.raises(ArtifactError, match=rf"files of '{file.parent.name}' in the pipeline .* lack") as error:
                load(base)
            assert error.value.exit_code == 65
            assert f"lack 1 weight: {lost};" in str(error.value)
            file.write_bytes(whole)


def test_weights_of_another_shape_are_named_with_both_shapes(base: Path):
    name = "text_model.embeddings.position_embedding.weight"
    change_weights(base / WEIGHTS[2], lambda weights: weights.update({name: torch.zeros(5, 16)}))
    with pytest.raises(ArtifactError) as error:
        load_all(base)
    assert str(error.value) == (
        f"the files of 'text_encoder' in the pipeline {str(base)!r} do not fit its config.json: 1 weight: {name} is "
        "[5, 16], expected [12, 64]; fetch them again"
    )


@pytest.mark.parametrize("kept", [("shared.weight",), ("encoder.embed_tokens.weight",), None])
@pytest.mark.parametrize("name", ["sd3", "wan"])
def test_shared_weights_may_have_either_name_or_both(name: str, kept: tuple[str, ...] | None, tmp_path: Path):
    base = tiny_pipelines.save(name, tmp_path / "base")
    file = max(base.glob("text_encoder*/model.safetensors"))
    table = load_file(file)["shared.weight"]

    def rename(weights: dict[str, torch.Tensor]) -> None:
        del weights["shared.weight"]
        weights |= {name: table.clone() for name in kept or ("shared.weight", "encoder.embed_tokens.weight")}

    change_weights(file, rename)
    state = _loading.read_part(str(base), file.parent.name).state_dict()
    assert torch.equal(state["encoder.embed_tokens.weight"], table)
