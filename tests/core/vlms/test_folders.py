"""Folders of VLMs: what is missing or damaged is named by planning."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_rl_core.captioners import vlm
from cosmos_rl_core.errors import ConfigError
from tests.core.captioners.test_vlm_captioner import captions, change, medium, options_of
from tests.core.vlms import tiny
from tests.core.vlms.cases import QWEN3, pixels


def without(*names: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return remove


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (without("config.json"), ["has no config.json; expected the folder of a VLM of transformers"]),
        (
            lambda folder: change(folder / "config.json", architectures=["LlavaForConditionalGeneration"]),
            ["no VLM plugin serves 'LlavaForConditionalGeneration'", "Qwen2_5_VLForConditionalGeneration (qwen_vl)"],
        ),
        (
            without("model.safetensors", "tokenizer.json", "chat_template.jinja", "video_preprocessor_config.json"),
            [
                "no model.safetensors, nor model.safetensors.index.json with a weight_map",
                "no tokenizer; expected one of tokenizer.json, vocab.json, tokenizer.model",
                "no chat template; expected chat_template.jinja, or chat_template in one of tokenizer_config.json",
                "patch_size",
            ],
        ),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "other.safetensors") and None,
            ["no model.safetensors"],
        ),
    ],
    ids=["no settings", "unknown class", "several", "other weights"],
)
def test_a_folder_that_cannot_be_used_is_refused_by_planning(
    damage: Callable[[Path], None], expected: list[str], tmp_path: Path
):
    folder = Path(tiny.save_talker(tmp_path, QWEN3))
    if "patch_size" in expected:
        change(folder / "preprocessor_config.json", patch_size=5)
    damage(folder)
    with pytest.raises(ConfigError) as refused:
        options_of(folder).pinned()
    assert [words for words in expected if words not in str(refused.value)] == []


def test_weights_of_several_files_are_all_needed(tmp_path: Path):
    folder = Path(tiny.save_talker(tmp_path, QWEN3))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors of the weights are missing; fetch them"):
        options_of(folder).pinned()
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"x")
    first = options_of(folder).pinned().files
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"y")
    assert options_of(folder).pinned().files != first


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("no/such/folder", "is not a directory here: pass the local directory of a VLM of transformers, or a name on"),
        ("nobody/no-model", "is not downloaded by itself: hf download nobody/no-model"),
    ],
)
def test_a_model_that_is_not_here_is_refused(model: str, expected: str):
    with pytest.raises(ConfigError) as refused:
        options_of(model).pinned()
    assert expected in str(refused.value)


def test_a_name_on_the_hub_is_the_folder_in_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = Path(tiny.save_talker(tmp_path / "model", QWEN3))
    repository = tmp_path / "hub" / "models--owner--talker"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40, encoding="utf-8")
    (repository / "snapshots" / ("0" * 40)).mkdir(parents=True)
    for file in folder.iterdir():
        (repository / "snapshots" / ("0" * 40) / file.name).symlink_to(file)
    named, here = (options_of(model).pinned() for model in ("owner/talker", folder))
    assert named.model == "owner/talker"
    assert named.identity() == here.identity()
    assert [str(one) for one in vlm.Captioner(named).captions([medium(pixels(1, 20, 30))])] == captions(
        str(folder), medium(pixels(1, 20, 30))
    )
