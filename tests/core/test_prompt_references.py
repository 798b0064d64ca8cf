"""Pictures that prompts in files refer to: their part in ids, and what is refused."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cosmos_rl_core.datasets import _references
from cosmos_rl_core.datasets._base import prompt_id
from cosmos_rl_core.datasets._prompt_files import prompts_of, read_prompts
from cosmos_rl_core.datasets._references import decoded
from cosmos_rl_core.errors import ConfigError


def picture(path: Path, seed: int, size: tuple[int, int] = (20, 30)) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def test_ids_without_references_are_those_of_texts_alone():
    assert prompt_id("a cat") == f"p-{hashlib.sha256(b'a cat').hexdigest()[:16]}"
    assert len({prompt_id("a cat"), prompt_id("a cat", ["0"]), prompt_id("a cat", ["0", "1"])}) == 3
    assert prompt_id("a cat", ["0", "1"]) != prompt_id("a cat", ["1", "0"])


def test_references_are_paths_next_to_the_file_and_part_of_the_prompt(tmp_path: Path):
    (tmp_path / "pictures").mkdir()
    first, second = (picture(tmp_path / "pictures" / f"{n}.png", n, (20, 30 + n)) for n in (0, 1))
    file = written(
        tmp_path,
        {"prompt": "a hat", "references": ["pictures/0.png"]},
        {"prompt": "a hat", "references": ["pictures/1.png", str(first)], "difficulty": 3},
        {"prompt": "a hat"},
        {"prompt": "a hat", "references": ["pictures/0.png"]},
    )
    one, two, bare = read_prompts(file)
    assert [(r.height, r.width) for r in two.references] == [(20, 31), (20, 30)]
    assert one.references[0].digest == hashlib.sha256(first.read_bytes()).hexdigest()
    assert two.references[0].source == str(second)
    assert two.metadata == {"difficulty": 3}
    assert (bare.references, bare.id) == ((), prompt_id("a hat"))
    assert "source" not in one.identity()["references"][0]
    assert "references" not in bare.identity()


def test_the_same_picture_elsewhere_is_the_same_prompt(tmp_path: Path):
    found: list[str] = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        picture(tmp_path / name / "a.png", 0)
        found += [one.id for one in read_prompts(written(tmp_path / name, {"prompt": "x", "references": ["a.png"]}))]
    assert found[0] == found[1]


def test_all_references_that_cannot_be_used_are_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_references, "MOST_PIXELS", 100 * 100)
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    picture(tmp_path / "huge.png", 0, (101, 100))
    whole = picture(tmp_path / "whole.png", 0).read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.png").write_text("no picture", encoding="utf-8")
    names = ["missing.png", "moving.gif", "huge.png", "cut.png", "text.png"]
    rows: list[dict[str, Any]] = [{"prompt": "x", "references": [name]} for name in names]
    rows += [{"prompt": "x", "references": "whole.png"}, {"prompt": "x", "references": ["whole.png"] * 9}]
    with pytest.raises(ConfigError) as caught:
        read_prompts(written(tmp_path, *rows))
    lines = str(caught.value)
    assert f"line 1: no file at {tmp_path / 'missing.png'}" in lines
    assert "moving.gif: an animation of 2 pictures; expected one picture" in lines
    assert "huge.png: 101 x 100 pixels, at most 10000 are taken" in lines
    assert "cut.png: no picture that can be decoded" in lines
    assert "text.png: no picture that can be decoded" in lines
    assert "line 6: expected \"references\" to be a list of at most 8 paths of pictures, found 'whole.png'" in lines
    assert "line 7: expected" in lines


def test_prompts_that_come_from_no_file_have_none():
    with pytest.raises(ConfigError, match="which only prompts in a file of this machine have"):
        prompts_of("rows", [("row 1", {"prompt": "x", "references": ["a.png"]})])


def test_pictures_are_decoded_as_they_are_shown(tmp_path: Path):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    turned = Image.Exif()
    turned[0x0112] = 6  # shown a quarter turned to the right
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=turned)
    assert np.array_equal(decoded((tmp_path / "turned.png").read_bytes())[0], np.rot90(pixels, -1))
    clear = np.dstack([pixels, np.full((4, 6), 255, np.uint8)])
    clear[0, 0] = (10, 20, 30, 0)
    Image.fromarray(clear).save(tmp_path / "clear.png")
    found = decoded((tmp_path / "clear.png").read_bytes())[0]
    assert found[0, 0].tolist() == [255, 255, 255]
    assert np.array_equal(found[1:], pixels[1:])
    Image.fromarray(pixels[..., 0]).save(tmp_path / "grey.png")
    assert decoded((tmp_path / "grey.png").read_bytes()).shape == (1, 4, 6, 3)
