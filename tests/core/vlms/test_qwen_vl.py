"""Sizes, samples, patches, times and positions of Qwen2.5-VL and Qwen3-VL, against closed forms and stock values.

The script ``test_stock_processors.py`` made the values in ``golden/``.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from cosmos_rl_core.datasets._base import ItemError
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.vlms._base import Clip, Processor, processor_of
from cosmos_rl_core.vlms._patches import patches, smart_size
from cosmos_rl_core.vlms._prompts import Prompts, normalise, resize
from tests.core.vlms import tiny
from tests.core.vlms.cases import ARCHITECTURES, CASES, EARLIER_TOKENS, QWEN3, QWEN25, conversation, pixels, thinned


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save(tmp_path_factory.mktemp(request.param), request.param)


def processor(folder: Path, architecture: str, **video: Any) -> Processor:
    """With patches of the true size, and defaults otherwise."""
    sizes = {"patch_size": 14 if architecture == QWEN25 else 16}
    return processor_of(tiny.save(folder, architecture, {"image": sizes, "video": sizes}), {"video": video})


@pytest.mark.parametrize("case", CASES)
def test_inputs_equal_the_stock_processors(folder: str, case: str):
    (architecture,) = (name for name in ARCHITECTURES if name in folder)
    media, video = CASES[case]
    asked = [conversation(shapes, index) for index, shapes in enumerate(media)]
    batch = Prompts(folder, {"video": video}).prepare(asked)
    with np.load(Path(__file__).parent / "golden" / f"{architecture}.npz") as golden:
        expected = {key.partition("/")[2]: golden[key] for key in golden.files if key.startswith(f"{case}/")}
    assert batch.keys() == expected.keys()
    for name, values in batch.items():
        np.testing.assert_array_equal(thinned(name, values.numpy()), expected[name], err_msg=name)


NO_CLIP_MARKERS = {"clip_markers": False}


@pytest.mark.parametrize("case", CASES)
def test_tokens_without_markers_around_clips_equal_transformers_4(tmp_path: Path, case: str):
    media, video = CASES[case]
    asked = [conversation(shapes, index) for index, shapes in enumerate(media)]
    batch = Prompts(tiny.save(tmp_path, QWEN3), {"video": {**video, **NO_CLIP_MARKERS}}).prepare(asked)
    with np.load(EARLIER_TOKENS) as earlier:
        np.testing.assert_array_equal(batch["input_ids"].numpy(), earlier[case])


def test_a_clip_without_markers_around_it_differs_in_two_tokens_alone(tmp_path: Path):
    path, clips = tiny.save(tmp_path, QWEN3), conversation([(4, 16, 16, 4), (4, 16, 16, 4)], 0)
    with_them, without = (Prompts(path, {"video": one}) for one in ({}, NO_CLIP_MARKERS))
    many, few = (prompts.prepare([clips]) for prompts in (with_them, without))
    for marker in ("<|vision_start|>", "<|vision_end|>"):
        token = with_them.tokenizer.convert_tokens_to_ids(marker)
        assert [one["input_ids"][0].tolist().count(token) for one in (many, few)] == [4 + 2, 4]
    text = without.tokenizer.decode(few["input_ids"][0])
    assert text.count("seconds><|vision_start|><|video_pad|>") == text.count("<|video_pad|><|vision_end|>") == 4
    assert {name for name in many if not torch.equal(many[name], few[name])} == {
        "input_ids",
        "attention_mask",
        "mm_token_type_ids",
    }


def test_markers_can_only_be_left_out_of_a_template_that_writes_them(tmp_path: Path):
    prompts = Prompts(tiny.save(tmp_path, QWEN3), {"video": NO_CLIP_MARKERS})
    prompts.tokenizer.chat_template = (
        "{% for m in messages %}{% for p in m.content %}<|video_pad|>{% endfor %}{% endfor %}"
    )
    asked = [{"role": "user", "content": [{"type": "video", "video": pixels(4, 16, 16), "fps": 4.0}]}]
    with pytest.raises(ConfigError, match=r"<\|vision_start\|> and <\|vision_end\|>.*leave video.clip_markers out"):
        prompts.prepare([asked])


def test_only_a_model_that_reads_times_has_markers_around_clips(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"video: unknown setting 'clip_markers'; known: (?!.*clip_markers)"):
        processor(tmp_path, QWEN25, **NO_CLIP_MARKERS)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1, 420, 840), (420, 840)),
        ((1, 434, 826), (448, 840)),  # 15.5 and 29.5 tokens, to even
        ((1, 1000, 1500), (812, 1204)),  # 1.5 million pixels: sides by 1.2226, then down
        ((1, 20, 30), (56, 84)),  # 600 pixels: sides by 2.286, then up
        ((1, 10, 2000), (28, 812)),
    ],
)
def test_sizes_are_whole_tokens_within_bounds(shape: tuple[int, int, int], expected: tuple[int, int]):
    assert smart_size(shape, 1, 28, (56**2, 1280 * 28**2)) == expected


def test_sizes_of_every_shape_are_whole_tokens_within_bounds():
    for shape in np.random.default_rng(0).integers(1, 3000, (500, 2)).tolist():
        if max(shape) > 200 * min(shape):
            continue
        height, width = smart_size((1, *shape), 1, 28, (56**2, 1280 * 28**2))
        assert (height % 28, width % 28) == (0, 0)
        assert height * width <= 1280 * 28**2
        assert height * width >= 56**2


def test_bounds_of_qwen3_count_all_frames(tmp_path: Path):
    made = processor(tmp_path, QWEN3)
    # 768 tokens of 32 x 32 pixels in all: 96 a frame of 8, in the proportions of 100 x 150.
    assert made.size("video", 8, 1000, 1500) == (8 * 32, 12 * 32)
    assert made.size("video", 2, 1000, 1500) == (16 * 32, 24 * 32)
    assert made.size("image", 1, 1000, 1500) == (800, 1216)


@pytest.mark.parametrize(("frames", "height", "width"), [(1, 10, 2001), (4, 3000, 14)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_shape_too_long_is_refused(tmp_path: Path, architecture: str, frames: int, height: int, width: int):
    with pytest.raises(ItemError, match=r"pixels, expected at most 200 times|1 frames, expected at least 2"):
        processor(tmp_path, architecture).size("video", frames, height, width)


@pytest.mark.parametrize(
    ("architecture", "video", "frames", "expected"),
    [
        # 4.5 frames, down to whole patches of 2; or down to whole frames, with both ends.
        (QWEN25, {"fps": 4}, (9, 8), [0, 2, 4, 6]),
        (QWEN3, {"fps": 4}, (9, 8), [0, 3, 5, 8]),
        # At least 4, at most 768, never more than there are.
        (QWEN25, {"fps": 1}, (48, 24), [0, 12, 24, 36]),
        (QWEN3, {"fps": 1}, (48, 24), [0, 16, 31, 47]),
        (QWEN25, {"fps": 8}, (3, 8), [0, 1]),
        (QWEN3, {"fps": 8}, (3, 8), [0, 1, 2]),
        (QWEN25, {"fps": 2, "max_frames": 5}, (48, 8), [0, 12, 24, 36]),
        (QWEN3, {"fps": 2, "max_frames": 5}, (48, 8), [0, 12, 24, 35, 47]),
        (QWEN25, {"num_frames": 5}, (8, 8), [0, 2, 4, 6]),
        (QWEN3, {"num_frames": 3}, (8, 8), [0, 4, 7]),
        (QWEN3, {"num_frames": 3}, (2, 8), [0, 0, 1]),
        (QWEN25, {}, (3, 8), [0, 1, 2]),
        (QWEN3, {"do_sample_frames": False}, (3, 8), [0, 1, 2]),
        # 2 frames a second unless the folder says otherwise.
        (QWEN3, {}, (25, 10), [0, 6, 12, 18, 24]),
        # Rounding in transformers gives a 15th frame, number 17, which is not there.
        (QWEN25, {"num_frames": 14}, (17, 8), [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15]),
    ],
)
def test_frames_are_evenly_spaced(
    tmp_path: Path, architecture: str, video: dict[str, Any], frames: tuple[int, float], expected: list[int]
):
    assert processor(tmp_path, architecture, **video).sample(*frames) == expected


@pytest.mark.parametrize(
    ("architecture", "video", "total", "why"),
    [
        (QWEN25, {"fps": 2}, 1, "1 frames, expected at least 2"),
        (QWEN25, {"num_frames": 6}, 5, "5 frames, expected at least 6"),
        (QWEN3, {}, 1, "1 frames, expected at least 2"),
    ],
)
def test_a_video_too_short_is_refused(tmp_path: Path, architecture: str, video: dict[str, Any], total: int, why: str):
    with pytest.raises(ItemError, match=why):
        processor(tmp_path, architecture, **video).sample(total, 8)


def test_patches_are_ordered_by_token_then_by_place(folder: str):
    settings = processor_of(folder).image
    frames, (down, across), side = 3, (4, 6), settings.patch_size
    values = torch.arange(frames * 3 * down * side * across * side, device="cpu").view(
        frames, 3, down * side, across * side
    )
    found, grid = patches(values, settings)
    assert grid == [2, down, across]
    expected = [
        values[[2 * step, min(2 * step + 1, 2)], :, y : y + side, x : x + side].transpose(0, 1).flatten()
        for step in range(2)
        for token_y in range(0, down, 2)
        for token_x in range(0, across, 2)
        for y in (token_y * side, (token_y + 1) * side)
        for x in (token_x * side, (token_x + 1) * side)
    ]
    assert torch.equal(found, torch.stack(expected))


def test_pixels_are_scaled_without_aliasing_and_rounded():
    """The picture is smooth. In others, the CPU's integers also clamp between rows and columns."""
    rows, columns = torch.meshgrid(torch.arange(60, device="cpu"), torch.arange(90, device="cpu"), indexing="ij")
    picture = (rows + 2 * columns).to(torch.uint8).expand(2, 3, 60, 90)
    exact = functional.interpolate(picture.double(), (28, 56), mode="bicubic", align_corners=False, antialias=True)
    found = resize(picture, (28, 56))
    assert found.dtype == torch.uint8
    assert (found.double() - exact.clamp(0, 255).round()).abs().max() <= 1
    assert resize(picture, (60, 90)) is picture


def test_black_and_white_are_normalised_by_mean_and_deviation(folder: str):
    settings = processor_of(folder).image
    ends = torch.tensor([0, 255], dtype=torch.uint8, device="cpu").view(2, 1, 1, 1).expand(2, 3, 1, 1)
    black, white = normalise(ends, settings).flatten(1)
    mean, std = (torch.tensor(values, device="cpu") for values in (settings.image_mean, settings.image_std))
    torch.testing.assert_close(black, -mean / std)
    torch.testing.assert_close(white, (1 - mean) / std)


def clip(indices: tuple[int, ...], total: int, fps: float) -> Clip:
    return Clip(np.zeros((len(indices), 8, 8, 3), np.uint8), indices, total, fps)


def test_qwen3_writes_the_mean_time_of_each_step(tmp_path: Path):
    made = processor_of(tiny.save(tmp_path, QWEN3))
    taken = clip((0, 3, 5, 8, 9), 10, 8.0)
    text, inputs, _ = made.visual("video", torch.zeros(5, 3, 8, 16, device="cpu"), taken)
    assert inputs["video_grid_thw"] == [[3, 2, 4]]
    frame = "<|vision_start|><|video_pad|><|video_pad|><|vision_end|>"
    # (0 + 3) / 2 / 8 = 0.1875, (5 + 8) / 2 / 8 = 0.8125, and the last one twice: 9 / 8 = 1.125.
    assert text == f"<0.2 seconds>{frame}<0.8 seconds>{frame}<1.1 seconds>{frame}"
    assert "second_per_grid_ts" not in inputs


def test_qwen2_5_counts_the_seconds_of_a_step(tmp_path: Path):
    made = processor_of(tiny.save(tmp_path, QWEN25))
    text, inputs, _ = made.visual("video", torch.zeros(4, 3, 8, 16, device="cpu"), clip((0, 2, 4, 6), 9, 8.0))
    assert text == "<|video_pad|>" * 4
    # Steps of two frames, of which there are 4 in 9/8 of a second.
    assert inputs["second_per_grid_ts"] == [pytest.approx(9 / 8 / 4 * 2)]


def test_settings_of_the_real_folders_are_read(tmp_path: Path):
    """As they are published; the second has its settings of images alone, which videos take too."""
    real = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    real |= {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
    made = processor_of(tiny.save(tmp_path, QWEN25, {"image": real, "video": real}))
    (tmp_path / "video_preprocessor_config.json").unlink()
    for found in (made, processor_of(tmp_path)):
        assert found.video.size.longest_edge == 12845056
        assert found.size("image", 1, 1080, 1920) == (1092, 1932)
        assert not found.video.do_sample_frames


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_patches_that_the_model_does_not_have_are_refused(tmp_path: Path, architecture: str):
    settings = {"image": {"patch_size": 14}, "video": {"patch_size": 16, "merge_size": 3}}
    with pytest.raises(ConfigError) as refused:
        processor_of(tiny.save(tmp_path, architecture, settings))
    assert [line.strip() for line in str(refused.value).splitlines()[1:]] == [
        "video: patch_size is 16, but patch_size of the model's vision_config is 14",
        "video: merge_size is 3, but spatial_merge_size of the model's vision_config is 2",
    ]
