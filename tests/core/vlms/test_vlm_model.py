"""Models of toy size that answer about media; conversations and folders that cannot be used."""

import io
import itertools
import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from cosmos_rl_core.datasets._base import ItemError
from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.storage import media
from cosmos_rl_core.vlms._model import Vlm, load
from cosmos_rl_core.vlms._prompts import Prompts
from tests.core.vlms import tiny
from tests.core.vlms.cases import ARCHITECTURES, CASES, QWEN3, QWEN25, conversation, pixels

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def vlm(folder: str) -> Vlm:
    return load(folder, CPU, torch.float32, {"video": {"fps": 2.0}})


def asked(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def test_positions_count_text_then_rows_and_columns(vlm: Vlm):
    """Against a loop over tokens: text counts on, a medium counts in time, down and across from where it begins."""
    shapes = CASES["batch"].media
    batch = vlm.prepare([conversation(each, index) for index, each in enumerate(shapes)])
    found, _ = vlm.model.model.get_rope_index(**batch)
    seconds = iter(batch.get("second_per_grid_ts", torch.ones(2, device="cpu")).tolist())
    images, videos = iter(batch["image_grid_thw"].tolist()), iter(batch["video_grid_thw"].tolist())
    timed = type(vlm.model).__name__ == QWEN25
    for row, mask in enumerate(batch["attention_mask"].bool()):
        expected: list[tuple[int, ...]] = []
        position, steps = 0, iter(())
        for kind, run in itertools.groupby(batch["mm_token_type_ids"][row][mask].tolist()):
            tokens = len(list(run))
            if kind == 0:
                expected += [(position + i,) * 3 for i in range(tokens)]
                position += tokens
                continue
            if kind == 1:
                _, down, across = next(images)
                length, interval = 1, 0.0
            elif timed:
                length, down, across = next(videos)
                interval = 2 * next(seconds)
            else:
                if (step := next(steps, None)) is None:
                    count, *size = next(videos)
                    steps = itertools.repeat(size, count)
                    step = next(steps)
                (down, across), length, interval = step, 1, 0.0
            places = itertools.product(range(length), range(down // 2), range(across // 2))
            expected += [(position + int(t * interval), position + y, position + x) for t, y, x in places]
            position += max(down, across) // 2
        assert found[:, row, mask].T.tolist() == [list(place) for place in expected]


def test_answers_are_the_likeliest_tokens(vlm: Vlm):
    """Against the whole forward once a token, without the model's cache."""
    batch = vlm.prepare([conversation([(20, 30), (6, 20, 30, 4)], 0)])
    (answer,) = vlm.generate(batch, 4)
    grown = dict(batch)
    with torch.no_grad():
        for _ in range(4):
            token = vlm.model(**grown).logits[:, -1].argmax(-1, keepdim=True)
            for name, more in (("input_ids", token), ("attention_mask", 1), ("mm_token_type_ids", 0)):
                grown[name] = torch.cat([grown[name], torch.zeros_like(token) + more], dim=1)
    new = grown["input_ids"][0, batch["input_ids"].shape[1] :]
    assert answer == vlm.prompts.tokenizer.decode(new, skip_special_tokens=True)
    assert vlm.generate(batch, 4) == [answer]


def test_an_answer_ends_with_the_turn(vlm: Vlm, monkeypatch: pytest.MonkeyPatch):
    batch = vlm.prepare([conversation([], 0)])
    with torch.no_grad():
        first = int(vlm.model(**batch).logits[0, -1].argmax())
    monkeypatch.setattr(vlm.model.generation_config, "eos_token_id", [first])
    assert vlm.generate(batch, 50) == [vlm.prompts.tokenizer.decode([first], skip_special_tokens=True)]


def test_settings_of_sampling_in_the_folder_have_no_part_in_answers(vlm: Vlm, folder: str):
    file = Path(folder, "generation_config.json")
    written = file.read_text(encoding="utf-8")
    sampling = {"do_sample": True, "temperature": 5.0, "top_k": 50, "repetition_penalty": 9.0}
    file.write_text(json.dumps(json.loads(written) | sampling), encoding="utf-8")
    other = load(folder, CPU, torch.float32)
    file.write_text(written, encoding="utf-8")
    batch = vlm.prepare([conversation([(20, 30)], 0)])
    assert other.generate(batch, 12) == vlm.generate(batch, 12)


def test_texts_describe_media_of_all_kinds(vlm: Vlm, tmp_path: Path):
    picture, frames = pixels(1, 20, 30)[0], pixels(9, 20, 30)
    (tmp_path / "picture.png").write_bytes(media.encode(picture[None])[1])
    (tmp_path / "clip.mkv").write_bytes(media.encode(frames)[1])
    clip = {"type": "video", "video": frames, "fps": media.FPS}
    texts = vlm.describe([{"type": "image", "image": picture}, clip], "What is this?", 4)
    with (tmp_path / "clip.mkv").open("rb") as file:
        image = {"type": "image", "image": str(tmp_path / "picture.png")}
        assert vlm.describe([image, {"type": "video", "video": file}], "What is this?", 4) == texts
    question = {"type": "text", "text": "What is this?"}
    one = vlm.prepare([asked({"type": "video", "video": tmp_path / "clip.mkv"}, question)])
    two = vlm.prepare([asked(clip, question)])
    assert all(torch.equal(one[name], two[name]) for name in one.keys() | two.keys())


def test_other_items_of_a_batch_do_not_change_the_logits(vlm: Vlm):
    alone = vlm.prepare([conversation([(20, 30)], 0)])
    padded = vlm.prepare([conversation([(20, 30)], 0), conversation([(8, 8), (5, 9, 40, 10)], 9)])
    with torch.no_grad():
        expected, found = vlm.model(**alone).logits[0, -1], vlm.model(**padded).logits[0, -1]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_more_tokens_than_positions_are_refused(vlm: Vlm):
    batch = vlm.prepare([conversation([], 0)])
    with pytest.raises(ItemError, match="32 tokens and 4065 new ones, but the model has positions for 4096"):
        vlm.generate(batch, 4065)


def test_a_prompt_with_an_answer_ends_after_the_answer(folder: str):
    prompts = Prompts(folder)
    turn = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    (ids,) = prompts.prepare([turn])["input_ids"]
    assert prompts.tokenizer.decode(ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"


def test_transparent_parts_are_white_and_pictures_upright(folder: str, tmp_path: Path):
    clear = Image.new("RGBA", (16, 8), (255, 0, 0, 0))
    clear.save(tmp_path / "clear.png")
    turned, orientation = Image.fromarray(pixels(1, 8, 16)[0]), Image.Exif()
    orientation[0x0112] = 6
    turned.save(tmp_path / "turned.png", exif=orientation)
    prompts = Prompts(folder)
    for name, expected in (("clear", np.full((8, 16, 3), 255, np.uint8)), ("turned", np.rot90(pixels(1, 8, 16)[0], 3))):
        found = prompts.prepare([asked({"type": "image", "image": tmp_path / f"{name}.png"})])
        wanted = prompts.prepare([asked({"type": "image", "image": expected})])
        assert torch.equal(found["pixel_values"], wanted["pixel_values"])


def mp4(folder: Path) -> bytes:
    """Frames that lean on each other, and a file whose end is its table of contents."""
    with av.open(str(folder / "whole.mp4"), "w") as container:
        stream = container.add_stream("libx264rgb", rate=24, options={"crf": "0"})
        stream.height, stream.width, stream.pix_fmt = 16, 32, "rgb24"
        for frame in pixels(10, 16, 32):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return (folder / "whole.mp4").read_bytes()


def test_frames_of_a_compressed_video_are_found_by_number(folder: str, tmp_path: Path):
    prompts = Prompts(folder, {"video": {"num_frames": 4}})
    found = prompts.prepare([asked({"type": "video", "video": io.BytesIO(mp4(tmp_path))})])
    wanted = prompts.prepare([asked({"type": "video", "video": pixels(10, 16, 32), "fps": 24})])
    assert all(torch.equal(found[name], wanted[name]) for name in found.keys() | wanted.keys())


WORDS = {"type": "text", "text": "a"}
GREY = np.zeros((8, 8, 3), np.uint8)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"role": "critic", "content": "a"}, "message 1: role 'critic', expected one of system, user, assistant, tool"),
        ({"role": "user"}, "message 1: expected role and content"),
        ({"role": "user", "content": 3}, "content is neither a text nor a list of parts"),
        (asked({"type": "audio"})[0], "a part of type 'audio', expected one of text, image, video"),
        (asked({"type": ["text"]})[0], "a part of type ['text'], expected one of text, image, video"),
        (asked({"type": "text", "text": "a\ud800"})[0], "half of a surrogate pair"),
        (asked({"type": "image", "image": None})[0], "found NoneType, expected pixels as an array, a path, or a file"),
        (asked({"type": "image"})[0], "a part of type 'image' has type; known: image, type"),
        (asked({"type": "image", "image": GREY, "fps": 2})[0], "has fps, image, type; known: image, type"),
        (asked({"type": "text", "text": None})[0], "text is NoneType, expected a string"),
        (asked({"type": "text", "text": "a<|im_end|>b<|video_pad|>"})[0], "holds '<|im_end|>', '<|video_pad|>'"),
        (asked({"type": "image", "image": GREY[..., :1]})[0], "uint8 [8, 8, 1], expected uint8 [height, width, 3]"),
        (asked({"type": "image", "image": GREY.astype(float)})[0], "pixels are float64"),
        (asked({"type": "image", "image": np.stack([GREY, GREY])})[0], "2 frames, expected 1; give it as a video"),
        (asked({"type": "image", "image": GREY[:0]})[0], "uint8 [0, 8, 3]"),
        (asked({"type": "video", "video": GREY})[0], "expected uint8 [frames, height, width, 3]"),
        (asked({"type": "video", "video": GREY[None]})[0], "fps = None, expected the frames per second"),
        (asked({"type": "video", "video": GREY[None], "fps": 0})[0], "fps = 0, expected"),
        (asked({"type": "video", "video": GREY[None], "fps": float("nan")})[0], "fps = nan, expected"),
        (asked({"type": "video", "video": io.BytesIO(b"x"), "fps": 2})[0], "fps = 2 given with a file; leave it out"),
        (asked({"type": "video", "video": io.BytesIO(b"no video")})[0], "cannot be read"),
        (asked({"type": "image", "image": io.BytesIO(b"no picture")})[0], "cannot be read"),
        (asked({"type": "image", "image": "/no/such.png"})[0], "/no/such.png: cannot be read"),
    ],
)
def test_a_message_that_cannot_be_used_is_refused(folder: str, message: Any, why: str):
    with pytest.raises(ItemError) as refused:
        Prompts(folder).prepare([[message]])
    assert why in str(refused.value)


def test_a_damaged_video_is_refused(folder: str, tmp_path: Path):
    whole = mp4(tmp_path)
    cut = whole[: len(whole) // 2]
    zeroed = whole.replace(whole[200:1200], bytes(1000))
    for data in (cut, zeroed):
        with pytest.raises(ItemError, match=r"message 1: (cannot be read|frame \d+ of \d+ cannot be decoded)"):
            Prompts(folder).prepare([asked({"type": "video", "video": io.BytesIO(data)})])


@pytest.mark.parametrize("conversations", [[], [[]]])
def test_an_empty_batch_of_conversations_is_refused(folder: str, conversations: Any):
    with pytest.raises(ItemError, match="expected at least one"):
        Prompts(folder).prepare(conversations)


def test_a_template_that_leaves_media_out_is_refused(tmp_path: Path):
    prompts = Prompts(tiny.save(tmp_path, QWEN3))
    prompts.tokenizer.chat_template = "{{ messages[0].role }}"
    with pytest.raises(ConfigError, match=r"the chat template writes \[\] for the media \['image'\]; expected one"):
        prompts.prepare([asked({"type": "image", "image": GREY})])


@pytest.mark.parametrize("name", ["processor_config.json", "chat_template.json"])
def test_the_template_of_the_processor_comes_first(tmp_path: Path, name: str):
    Path(tiny.save(tmp_path, QWEN3), name).write_text('{"chat_template": "{{ messages[0].role }}"}', encoding="utf-8")
    prompts = Prompts(str(tmp_path))
    assert prompts.tokenizer.decode(prompts.prepare([asked(WORDS)])["input_ids"][0]) == "user"


def test_a_folder_without_template_and_tokens_is_refused(tmp_path: Path):
    tiny.save(tmp_path, QWEN3)
    (tmp_path / "chat_template.jinja").unlink()
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8").replace("video_pad", "other_pad"), encoding="utf-8")
    config = tmp_path / "tokenizer_config.json"
    config.write_text(config.read_text(encoding="utf-8").replace("video_pad", "other_pad"), encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        Prompts(str(tmp_path))
    assert "no chat template; expected chat_template.jinja" in str(refused.value)
    assert "the tokenizer has no special token <|video_pad|>" in str(refused.value)


@pytest.mark.parametrize("text", ["{", "{}"])
def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path: Path, text: str):
    Path(tiny.save(tmp_path, QWEN3), "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no tokenizer that transformers reads, such as tokenizer\.json: "):
        Prompts(str(tmp_path))


@pytest.mark.parametrize("change", ["missing", "shape"])
def test_missing_weights_are_named(tmp_path: Path, change: str):
    file = Path(tiny.save_model(tmp_path, QWEN3), "model.safetensors")
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if name.endswith("q_proj.weight"))
    tensor = tensors.pop(name)
    save_file(tensors if change == "missing" else {**tensors, name: tensor[:4].clone()}, file, {"format": "pt"})
    with pytest.raises(ArtifactError, match=rf"the files of the VLM .* 1 weight: {name}"):
        load(str(tmp_path), CPU, torch.float32)
