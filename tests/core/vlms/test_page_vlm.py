"""The family that docs/extend/vlm.md adds from outside answers about media; two families of one class are refused."""

import json
from pathlib import Path

import pytest
import torch

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.outside_plugins import find
from cosmos_rl_core.vlms._base import processor_of
from cosmos_rl_core.vlms._model import load
from tests.core.vlms import tiny
from tests.core.vlms.cases import QWEN2, QWEN3, pixels
from tests.pages import examples, write


@pytest.fixture
def page(tmp_path: Path):
    """The file of the page; this process forgets it afterwards."""
    write(tmp_path, examples("vlm.md"))
    yield str(tmp_path / "qwen2_vl.py")
    find([])


def test_a_family_is_one_file(page: str, tmp_path: Path):
    folder = tiny.save_model(tmp_path, QWEN2)
    with pytest.raises(ConfigError) as refused:
        load(folder, torch.device("cpu"), torch.float32)
    assert f"no VLM plugin serves '{QWEN2}'" in str(refused.value)
    assert "known: Qwen2VLRewardModelBT (qwen_vl), Qwen2_5_VLForConditionalGeneration (qwen_vl), " in str(refused.value)
    find([page])
    assert "qwen2_vl" in plugins.known("vlms")
    vlm = load(folder, torch.device("cpu"), torch.float32, {"video": {"num_frames": 4}})
    media = [{"type": "image", "image": pixels(1, 8, 8)[0]}, {"type": "video", "video": pixels(9, 16, 8), "fps": 8}]
    batch = vlm.prepare([[{"role": "user", "content": media}]])
    assert batch["video_grid_thw"].tolist() == [[2, 4, 2]]
    assert len(vlm.describe(media, "What is this?", 3)) == 2


def test_two_families_of_one_class_are_refused(page: str, tmp_path: Path):
    text = Path(page).read_text(encoding="utf-8").replace(QWEN2, QWEN3)
    (tmp_path / "other_vl.py").write_text(text, encoding="utf-8")
    find([str(tmp_path / "other_vl.py")])
    with pytest.raises(ConfigError, match=f"the VLM plugins other_vl, qwen_vl all serve '{QWEN3}'; leave one out"):
        processor_of(tiny.save(tmp_path, QWEN3))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (None, "has no config.json; expected the folder of a VLM"),
        ("[", "is not a JSON object"),
        ("[]", "is not a JSON object"),
        ("{}", "architectures is None, expected a list with the name of one class"),
        ('{"architectures": [3]}', "architectures is [3]"),
        ('{"architectures": ["SomeVL"]}', "no VLM plugin serves 'SomeVL'"),
    ],
)
def test_a_folder_that_is_no_vlm_is_refused(tmp_path: Path, config: str | None, why: str):
    if config is not None:
        (tmp_path / "config.json").write_text(config, encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        processor_of(tmp_path)
    assert why in str(refused.value)


def test_every_mistake_in_the_settings_is_named_at_once(tmp_path: Path):
    folder = tiny.save(tmp_path, QWEN3)
    image = {"do_resize": False, "resample": 2, "image_std": [0.5, 0, 0.5], "size": {"shortest_edge": 9}}
    video = {"patch_size": 4, "size": {"shortest_edge": 9, "longest_edge": 8}}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": image}), encoding="utf-8")
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(video), encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        processor_of(folder, {"video": {"fps": -1, "frames": 3}})
    said = str(refused.value)
    for line in (
        "processor_config.json: image_processor: do_resize: Input should be True, found False",
        "processor_config.json: image_processor: resample: Input should be 3, found 2",
        "processor_config.json: image_processor: image_std: Value error, expected numbers above 0, found [0.5, 0, 0.5]",
        "processor_config.json: image_processor: size.longest_edge: Field required",
        "video_preprocessor_config.json: size: Value error, shortest_edge 9 is more than longest_edge 8",
        "video: unknown setting 'frames'; known: size, patch_size",
        "video.fps: Input should be greater than 0, found -1",
    ):
        assert line in said


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("preprocessor_config.json", "{", "preprocessor_config.json is not JSON"),
        ("preprocessor_config.json", "[]", "expected a JSON object, found list"),
        ("processor_config.json", '{"image_processor": 3}', "image_processor is 3, expected a table"),
    ],
)
def test_files_that_are_no_settings_are_named(tmp_path: Path, name: str, text: str, why: str):
    Path(tiny.save(tmp_path, QWEN3), name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        processor_of(tmp_path)
    assert why in str(refused.value)


def test_a_folder_without_settings_says_where_they_belong(tmp_path: Path):
    folder = tiny.save(tmp_path, QWEN3)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (tmp_path / name).unlink()
    with pytest.raises(ConfigError) as refused:
        processor_of(folder, {"audio": {}})  # pyright: ignore[reportArgumentType]
    assert "no settings for images; expected preprocessor_config.json or processor_config.json" in str(refused.value)
    assert "no settings for videos; expected video_preprocessor_config.json, preprocessor_config" in str(refused.value)
    assert "unknown kind 'audio' of medium; known: image, video" in str(refused.value)
