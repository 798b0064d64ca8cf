"""cosmos-rl's recipes of vision-language models: what every key becomes, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cosmos_rl_core.config.vlm.recipe import VlmRecipe, checked
from cosmos_rl_core.conformance.kinds import hf_folder
from cosmos_rl_core.importers.translation import Entry, schema_of, translate
from cosmos_rl_core.recipes.reading import read_values
from cosmos_rl_core.vlms._base import processor_of
from tests.core.importers.cosmos_rl.recipes import changed
from tests.core.vlms import tiny
from tests.core.vlms.cases import QWEN3, QWEN25

FOLDER = Path(__file__).parents[3] / "upstream_vlm_recipes"
ROOT = Path(__file__).parents[5]
LLAVA, HF, REASON1, EVERY = "reason2-llava-sft", "reason2-hf-sft", "reason1-sft", "every-key"
NAMES = (LLAVA, HF, REASON1, EVERY)
CUSTOM = "train.train_policy.datasets.custom"


def read(name: str, **changes: Any) -> dict[str, Any]:
    return changed(FOLDER / f"{name}.toml", **changes)


def entry(values: dict[str, Any], key: str) -> Entry:
    return next(entry for entry in translate(values).report if entry.key == key)


def recipe_of(values: dict[str, Any], **train: Any) -> VlmRecipe:
    found = translate(values)
    assert found.mistakes == []
    recipe, idle = checked(found.values | {"train": found.values["train"] | train}, "imported")
    assert idle == []
    return recipe


def keys(values: Any) -> int:
    """How many keys a file has."""
    return sum(map(keys, values.values())) if isinstance(values, dict) and values else 1


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_reported_once_with_a_setting_or_a_reason(name: str):
    translation = translate(read(name))
    assert (schema_of(read(name)), translation.mistakes) == ("vlm", [])
    said = [entry for entry in translation.report if entry.said]
    assert len({entry.key for entry in said}) == len(said) == keys(read(name))
    assert all(entry.why or entry.settings for entry in translation.report)


@pytest.mark.parametrize(("name", "ours"), [(LLAVA, "llava"), (HF, "hf")])
def test_our_recipe_has_the_values_of_cosmos_rls(name: str, ours: str):
    shipped, _ = checked(read_values(str(ROOT / f"configs/vlm_sft/{ours}.toml")), ours)
    theirs = recipe_of(read(name), num_iterations=shipped.train.num_iterations)
    places = {"annotation_path", "media_path", "path"}

    def without_places(recipe: VlmRecipe) -> dict[str, Any]:
        values = recipe.model_dump()
        (dataset,) = values["train"]["train_policy"]["datasets"].values()
        for place in places & dataset.keys():
            dataset[place] = ""
        return values

    assert without_places(theirs) == without_places(shipped)
    assert theirs.train.train_batch_per_replica == 32 * 4
    assert theirs.policy.trains == ("vision", "projector", "language")


def test_the_report_says_that_the_script_reads_two_turns_and_that_all_are_trained_on_here():
    (found,) = (one for one in translate(read(LLAVA)).report if "train.train_policy.turns" in one.settings)
    assert found.settings == {"train.train_policy.turns": "all"}
    assert "first question and answer of a row only; here all turns" in found.why
    assert not any("train.train_policy.turns" in one.settings for one in translate(read(HF)).report)


def test_an_epoch_becomes_iterations_of_as_many_steps_as_cosmos_rl_saves_after(tmp_path: Path):
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "!"}]
    rows = [{"conversations": turns}] * 700
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    place = {"custom__dataset__annotation_path": str(tmp_path / "rows.json")}
    # 8 conversations on each of 4 ranks: 21 steps of 32, and saves after 20.
    values = read(LLAVA, train__train_batch_per_replica=8, **place)
    assert translate(values).values["train"]["num_iterations"] == 2
    assert translate(read(LLAVA, train__epoch=3, **place)).values["train"]["num_iterations"] == 1
    assert entry(read(LLAVA, train__epoch=3, **place), "train.epoch").why == "15 steps"
    hf_folder.save(tmp_path / "chats", {"conversations": pa.array(["[]"] * 300)}, {})
    values = read(HF, train__train_batch_per_replica=1, custom__dataset__path=str(tmp_path / "chats"))
    assert translate(values).values["train"]["num_iterations"] == math.ceil(300 // 4 / 20)
    assert translate(read(HF)).summary.endswith("; still to set: train.num_iterations")


def test_a_dataset_of_a_hub_is_left_to_the_user_and_a_saved_one_is_taken(tmp_path: Path):
    assert "train.train_policy.datasets" in translate(read(REASON1)).summary
    assert "datasets" not in translate(read(REASON1)).values["train"]["train_policy"]
    hf_folder.save_splits(tmp_path, **{name: {"conversations": pa.array(["[]"] * 8)} for name in ("a", "b")})
    named = {"train__train_policy__dataset__name": str(tmp_path), "train__train_policy__dataset__split": "b"}
    values = translate(read(REASON1, **named, train__train_policy__system_prompt="Be brief.")).values
    assert values["train"]["train_policy"]["datasets"]["custom"] == {
        "name": "hf_chat",
        "path": str(tmp_path),
        "split": "b",
        "conversation_column_name": "conversations",
        "system_prompt": "Be brief.",
    }
    assert values["train"]["num_iterations"] == 1


def test_adapters_lie_on_every_linear_module_if_the_file_says_so():
    lora = recipe_of(read(EVERY), num_iterations=1).policy.lora
    assert lora is not None
    assert (lora.r, lora.lora_alpha, lora.target_modules) == (16, 32.0, ("all-linear",))


@pytest.mark.parametrize(
    ("vision", "video"),
    [
        (None, {"fps": 1.0}),
        ({}, {"fps": 2.0}),
        ({"fps": 4}, {"fps": 4.0}),
        ({"nframes": 8}, {"num_frames": 8}),
        ({"fps": 1, "min_frames": 5, "max_frames": 11}, {"fps": 1.0, "min_frames": 6, "max_frames": 10}),
    ],
)
def test_frames_are_taken_as_the_script_takes_them(vision: Any, video: dict[str, Any]):
    values = read(LLAVA) if vision is None else read(LLAVA, custom__vision=vision)
    found = translate(values).values["policy"]["media"]["video"]
    others = {"cap_pixels_per_frame", "max_video_tokens", "size", "clip_markers"}
    assert {key: found[key] for key in found.keys() - others} == video


@pytest.mark.parametrize(
    ("name", "model", "expected"),
    [
        (LLAVA, "nvidia/Cosmos-Reason2-2B", False),
        (HF, "Qwen/Qwen3-VL-2B-Instruct", False),
        (REASON1, "nvidia/Cosmos-Reason2-2B", False),
        (LLAVA, "nvidia/Cosmos-Reason1-7B", None),
        (LLAVA, "models/mine", None),
    ],
)
def test_clips_of_qwen3_have_the_tokens_of_the_transformers_that_cosmos_rl_uses(
    name: str, model: str, expected: bool | None
):
    values = read(name, policy__model_name_or_path=model)
    found = translate(values).values["policy"].get("media", {}).get("video", {})
    assert found.get("clip_markers") is expected
    said = [one for one in translate(values).report if "policy.media.video.clip_markers" in one.settings]
    assert [("as cosmos-rl's transformers" in one.why) for one in said] == [True] * (expected is not None)


def scaled(frames: int, shape: tuple[int, int], side: int, vision: dict[str, int]) -> tuple[int, int]:
    """The size that ``qwen_vl_utils`` scales the frames of a video to, as its documents say, for 4096 tokens."""
    budget, least = int(4096 * side**2 * 0.9), vision.get("min_pixels", 128 * side**2)
    most = max(min(768 * side**2, budget * 2 // frames), int(least * 1.05))
    most = min(vision.get("max_pixels", most), most)
    pixels = math.prod(shape)
    down, across = (round(edge / side) * side for edge in shape)
    if down * across > most:
        scale = math.sqrt(pixels / most)
        down, across = (max(side, math.floor(edge / scale / side) * side) for edge in shape)
    return down, across


@pytest.mark.parametrize("vision", [{}, {"max_pixels": 262_144}, {"min_pixels": 65_536}], ids=str)
@pytest.mark.parametrize(
    ("architecture", "model", "side"),
    [(QWEN3, "nvidia/Cosmos-Reason2-2B", 32), (QWEN25, "nvidia/Cosmos-Reason1-7B", 28)],
)
def test_videos_are_scaled_as_the_script_scales_them(
    tmp_path: Path, architecture: str, model: str, side: int, vision: dict[str, int]
):
    folder = {kind: {"patch_size": side // 2} for kind in ("image", "video")}
    path = tiny.save(tmp_path, architecture, folder)
    changes = {"policy__model_name_or_path": model, "custom__vision": vision}
    processor = processor_of(path, recipe_of(read(LLAVA, **changes), num_iterations=1).policy.media.changes)
    for frames in (4, 8, 30, 60):
        for shape in ((480, 640), (720, 1280), (1080, 1920)):
            assert processor.size("video", frames, *shape) == scaled(frames, shape, side, vision)


def test_pictures_have_the_bounds_of_the_file_and_else_of_the_model():
    assert "image" not in translate(read(LLAVA)).values["policy"]["media"]
    values = translate(read(LLAVA, custom__vision={"max_pixels": 262_144})).values
    assert values["policy"]["media"]["image"]["size"] == {"shortest_edge": 4 * 32**2, "longest_edge": 262_144}


def test_a_model_of_unknown_generation_leaves_the_bounds_to_the_user():
    translation = translate(read(LLAVA, policy__model_name_or_path="models/mine"))
    assert "policy.media.video.size" in translation.summary
    (found,) = (one for one in translation.report if "policy.media.video.size" in one.settings)
    assert "clip_markers = false" in found.why


def test_validation_asks_for_held_out_conversations():
    values = read(LLAVA, validation={"enable": True, "freq": 40})
    translation = translate(values)
    assert translation.values["validation"] == {"freq": 2}
    assert "validation.datasets" in translation.summary


REFUSED = [
    ("custom.vision.resized_height", 480, "set min_pixels and max_pixels"),
    ("custom.vision.video_start", 1.0, "cut the files first"),
    ("custom.vision.fsp", 1, "do not read it"),
    ("custom.dataset.media", "x", "do not read it"),
    ("custom.vision.max_pixels", "many", "whole number"),
    ("policy.freeze_pattern", ["visual"], "set policy.trains"),
    ("policy.model_safetensor_path", "x", "set policy.model_name_or_path"),
    ("train.optm_lr", [1e-6, 1e-5], "one learning rate"),
    ("train.fp8", {"enable_fp8": True}, "set it to false"),
    ("train.ckpt.save_freq_in_epoch", 1, "save_freq"),
    ("train.param_dtype", "float16", "bfloat16 or float32"),
    ("train.resume", "outputs/x", "checkpoints cannot be read"),
    ("train.train_policy.trainer_type", "sft_moe", 'trainer_type = "sft"'),
    ("train.train_policy.enable_dp_load_balancing", True, "set it to false"),
    ("policy.parallelism.dp_shard_size", -1, "needs policy.parallelism.dp_shard_size"),
]


@pytest.mark.parametrize(("key", "value", "said"), REFUSED, ids=[row[0] for row in REFUSED])
def test_impossible_settings_are_mistakes_that_say_what_to_do(key: str, value: Any, said: str):
    mistakes = translate(read(LLAVA, **{key.replace(".", "__"): value})).mistakes
    assert len(mistakes) >= 1
    assert any(said in mistake for mistake in mistakes), mistakes


def test_both_ways_to_sample_and_two_splits_are_refused(tmp_path: Path):
    both = translate(read(LLAVA, custom__vision={"fps": 1, "nframes": 8})).mistakes
    assert both
    assert all("both nframes and fps" in mistake for mistake in both)
    saved = {"train__train_policy__dataset__name": str(tmp_path)}
    (splits,) = translate(read(REASON1, train__train_policy__dataset__split=["a", "b"], **saved)).mistakes
    assert "one split" in splits


def test_equal_learning_rates_of_all_parts_are_one():
    assert translate(read(LLAVA, train__optm_lr=[2e-6, 2e-6])).values["train"]["optm_lr"] == 2e-6


def test_unknown_keys_are_mistakes_with_the_nearest_known_one():
    values = read(LLAVA, train__optm_lrr=1e-4, train__train_policy__balance_dp_tokens=True)
    assert sorted(translate(values).mistakes) == [
        "train.optm_lrr: unknown key; did you mean 'train.optm_lr'?",
        "train.train_policy.balance_dp_tokens: unknown key; did you mean 'train.train_policy.balance_dp_token'?",
    ]


WRONG: list[Any] = [{}, "x", -1, math.inf, [{"name": "a"}]]


@pytest.mark.parametrize("name", NAMES)
def test_the_report_comes_however_wrong_a_value_is(name: str):
    kind = ("train.train_policy.type", "policy.model_name_or_path")
    keys = [one.key for one in translate(read(name)).report if one.key and one.key not in kind]
    for number, key in enumerate(keys):
        values = read(name, **{key.replace(".", "__"): WRONG[number % len(WRONG)]})
        assert translate(values).summary.startswith("a file of")
