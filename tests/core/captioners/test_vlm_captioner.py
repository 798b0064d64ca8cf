"""Captions by models of toy size: against plain transformers, of media that cannot be used, of folders that cannot."""

import io
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoTokenizer

from cosmos_rl_core import outside_plugins
from cosmos_rl_core.captioners import vlm
from cosmos_rl_core.captioners._base import Medium, digest_of
from cosmos_rl_core.chat.client import RefusedError
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage import media
from cosmos_rl_core.vlms._prompts import Prompts
from tests.core.vlms import tiny
from tests.core.vlms.cases import ARCHITECTURES, QWEN3, QWEN25, pixels

PATCH, MERGED, MEAN, DEVIATION = 4, 2, (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
ASKED = "Describe it."
SILENT = ("<|im_end|>", "<|endoftext|>")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save_talker(tmp_path_factory.mktemp(request.param), request.param)


def options_of(folder: str | Path, **settings: Any) -> vlm.Options:
    values = {"by": "vlm", "model": str(folder), "instruction": ASKED, "max_new_tokens": 12, "param_dtype": "float32"}
    return vlm.Options.model_validate(values | settings)


def medium(frames: np.ndarray) -> Medium:
    kind: Literal["image", "video"] = "image" if len(frames) == 1 else "video"
    return of_bytes(kind, media.encode(frames)[1], len(frames))


def of_bytes(kind: Literal["image", "video"], data: bytes, frames: int = 1) -> Medium:
    return Medium("0000", kind, frames, partial(io.BytesIO, data))


def captions(folder: str, *some: Medium, **settings: Any) -> list[str | RefusedError]:
    return list(vlm.Captioner(options_of(folder, **settings)).captions(some))


def patches_by_hand(frames: np.ndarray, mean: tuple[float, ...], deviation: tuple[float, ...]) -> np.ndarray:
    """Patches of frames ``[frames, height, width, 3]`` whose sides are whole tokens, in the order that models take."""
    scaled = (frames / 255 - np.array(mean)) / np.array(deviation)
    doubled = np.concatenate([scaled, scaled]) if len(scaled) == 1 else scaled
    found = []
    for t in range(0, len(doubled), 2):
        for y in range(0, doubled.shape[1], PATCH * MERGED):
            for x in range(0, doubled.shape[2], PATCH * MERGED):
                for row, column in ((0, 0), (0, PATCH), (PATCH, 0), (PATCH, PATCH)):
                    top, left = y + row, x + column
                    patch = doubled[t : t + 2, top : top + PATCH, left : left + PATCH]
                    found.append(patch.transpose(3, 0, 1, 2).ravel())
    return np.stack(found).astype(np.float32)


def generated_by_hand(folder: str, frames: np.ndarray, seconds: float, dtype: torch.dtype = torch.float32) -> str:
    """The text that ``generate`` of plain transformers gives, from inputs made here. ``seconds`` is between frames."""
    name = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))["architectures"][0]
    model = getattr(transformers, name).from_pretrained(folder, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    kind = "image" if len(frames) == 1 else "video"
    half = name == QWEN3
    values = patches_by_hand(frames, *(((0.5,) * 3, (0.5,) * 3) if half else (MEAN, DEVIATION)))
    steps, down, across = max(1, len(frames) // 2), frames.shape[1] // PATCH, frames.shape[2] // PATCH
    pads = f"<|{kind}_pad|>" * (down * across // MERGED**2)
    if kind == "video" and half:
        times = [(2 * step + 0.5) * seconds for step in range(steps)]
        shown = "".join(f"<{time:.1f} seconds><|vision_start|>{pads}<|vision_end|>" for time in times)
    else:
        shown = pads * steps
    text = f"<|im_start|>user\n<|vision_start|>{shown}<|vision_end|>{ASKED}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    pad = tokenizer.convert_tokens_to_ids(f"<|{kind}_pad|>")
    of_media = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}[kind]
    inputs: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == pad).long() * (1 if kind == "image" else 2),
        of_media[0]: torch.from_numpy(values),
        of_media[1]: torch.tensor([[steps, down, across]], device="cpu"),
    }
    if kind == "video" and not half:
        inputs["second_per_grid_ts"] = torch.tensor([2 * seconds], device="cpu")
    tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    return tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True).strip()


@pytest.mark.parametrize("frames", [1, 4], ids=["image", "clip"])
def test_captions_equal_plain_transformers(folder: str, frames: int):
    for width in (16, 24, 32):
        shown = pixels(frames, 16, width)
        (found,) = captions(folder, medium(shown), **({"num_frames": frames} if frames > 1 else {}))
        assert found == generated_by_hand(folder, shown, 1 / media.FPS)


def test_captions_in_bfloat16_equal_plain_transformers(folder: str):
    for width in (16, 24, 32):
        shown = pixels(1, 16, width)
        (found,) = captions(folder, medium(shown), param_dtype="bfloat16")
        assert found == generated_by_hand(folder, shown, 1.0, torch.bfloat16)


def test_a_caption_depends_on_its_medium_alone(folder: str):
    some = [medium(pixels(*shape)) for shape in ((1, 20, 30), (8, 16, 16), (1, 8, 40), (1, 33, 12), (6, 30, 20))]
    together = [str(found) for found in captions(folder, *some, num_frames=4)]
    assert len({*together}) > 1
    assert [str(found) for found in captions(folder, *some[::-1], num_frames=4)] == together[::-1]
    assert [str(found) for one in some for found in captions(folder, one, num_frames=4)] == together


def test_large_media_are_scaled_down_once(folder: str):
    large = pixels(1, 32, 64)
    prompts = vlm_prompts(folder, 16)
    asked = [{"role": "user", "content": [{"type": "image", "image": large[0]}]}]
    assert prompts.prepare([asked])["image_grid_thw"].tolist() == [[1, 2, 4]]
    assert vlm_prompts(folder, None).prepare([asked])["image_grid_thw"].tolist() == [[1, 4, 10]]
    (found,) = captions(folder, medium(large), max_side=16)
    assert isinstance(found, str)


def vlm_prompts(folder: str, max_side: int | None) -> Prompts:
    return Prompts(folder, None, max_side)


@pytest.mark.parametrize(
    ("data", "kind", "why"),
    [
        (b"no picture", "image", "cannot be read: cannot identify image file"),
        (b"no video", "video", "cannot be read: "),
        (media.encode(pixels(3, 16, 16))[1], "video", "3 frames, expected at least 4"),
        (media.encode(pixels(1, 8, 2000))[1], "image", "8x2000 pixels, expected at most 200 times as long as wide"),
    ],
)
def test_media_that_cannot_be_used_are_refused(data: bytes, kind: Literal["image", "video"], why: str, folder25: str):
    good = medium(pixels(1, 20, 30))
    first, refused, last = captions(folder25, good, of_bytes(kind, data), good, num_frames=4, max_side=None)
    assert isinstance(refused, RefusedError)
    assert str(refused).startswith(why)
    assert refused.final
    assert first == last != ""


@pytest.fixture(scope="module")
def folder25(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save_talker(tmp_path_factory.mktemp("media"), QWEN25)


def test_a_caption_that_is_cut_is_refused(tmp_path: Path):
    folder = tiny.save_talker(tmp_path, QWEN3)
    shown = medium(pixels(1, 20, 30))
    (whole,) = captions(folder, shown)
    assert isinstance(whole, str)
    assert len(whole) > 1
    # The last token ends it, and is the last that it may have.
    assert captions(folder, shown, max_new_tokens=len(whole)) == [whole]
    (cut,) = captions(folder, shown, max_new_tokens=len(whole) - 1)
    assert str(cut) == f"the caption is cut at max_new_tokens = {len(whole) - 1}; raise it"


def test_an_empty_answer_is_refused(tmp_path: Path):
    folder = tiny.save_talker(tmp_path, QWEN3, SILENT, SILENT)
    (found,) = captions(folder, medium(pixels(1, 20, 30)))
    assert isinstance(found, RefusedError)
    assert str(found) == "the model answered nothing"


def test_more_tokens_than_positions_are_refused(folder: str):
    (found,) = captions(folder, medium(pixels(1, 20, 30)), max_new_tokens=4096)
    assert "but the model has positions for 4096; take fewer frames, or a smaller size" in str(found)


def test_captions_have_the_digest_of_all_that_decides_them(tmp_path: Path):
    folder = Path(tiny.save_talker(tmp_path / "model", QWEN3))
    (folder / "README.md").write_text("A model.", encoding="utf-8")

    def digest(**settings: Any) -> str:
        return digest_of(options_of(settings.pop("model", folder), **settings).pinned(), ())

    first = digest()
    (folder / "README.md").write_text("The same model.", encoding="utf-8")
    assert first == digest() == digest(model=shutil.copytree(folder, tmp_path / "copy"))
    settings = [{"instruction": "?"}, {"fps": 1.0}, {"num_frames": 4}, {"max_side": 64}, {"max_new_tokens": 9}]
    others = [digest(**one) for one in [*settings, {"param_dtype": "bfloat16"}]]
    for name in ("model.safetensors", "preprocessor_config.json", "chat_template.jinja", "generation_config.json"):
        file, whole = folder / name, (folder / name).read_bytes()
        file.write_bytes(whole + b" ")
        others.append(digest())
        file.write_bytes(whole)
    assert len({first, *others}) == 1 + len(others)
    assert digest() == first


def test_other_files_than_were_planned_are_refused(tmp_path: Path):
    folder = Path(tiny.save_talker(tmp_path / "model", QWEN3))
    planned = options_of(folder).pinned()
    assert planned.pinned() == planned
    assert planned.files is not None
    assert planned.files.processor == "qwen_vl"
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}', encoding="utf-8")
    with pytest.raises(ConfigError, match="has other files than were planned"):
        list(vlm.Captioner(planned).captions([medium(pixels(1, 20, 30))]))


def test_the_code_of_a_plugin_from_outside_is_part_of_the_digest(tmp_path: Path):
    outside = tmp_path / "my_vl.py"
    source = 'from cosmos_rl_core.vlms.qwen_vl import Qwen3VL\nPROCESSORS = {"MyVL": Qwen3VL}\n'
    folder = Path(tiny.save_talker(tmp_path / "model", QWEN3))
    change(folder / "config.json", architectures=["MyVL"])
    found: list[str] = []
    try:
        for end in ("", "# Another comment.\n"):
            outside.write_text(source + end, encoding="utf-8")
            outside_plugins.find([str(outside)])
            found.append(digest_of(options_of(folder).pinned(), outside_plugins.pins("")))
    finally:
        outside_plugins.find([])
    assert len({*found}) == 2


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | values), encoding="utf-8")


def test_special_tokens_in_the_instruction_are_refused_by_planning(folder: str):
    with pytest.raises(ConfigError, match=r"the instruction holds '<\|im_end\|>', special to the model; leave it out"):
        options_of(folder, instruction="Say <|im_end|>.").pinned()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_frames": 4, "fps": 2.0}, "num_frames and fps are both set; set one of them"),
        ({"instruction": " \n"}, "the instruction is empty"),
        ({"fps": 0}, "greater than 0"),
        ({"temperature": 1.0}, "Extra inputs"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], expected: str):
    with pytest.raises(ValueError, match=expected):
        options_of("/models/x", **settings)
