"""Pictures that prompts in files refer to: their part in ids, and what is refused."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from cosmos_rl_core.conformance.kinds.hf_folder import MEDIUM, media, save
from cosmos_rl_core.datasets import _reference_pixels, hf
from cosmos_rl_core.datasets._base import Prompt, prompt_id
from cosmos_rl_core.datasets._prompt_files import prompts_of, read_prompts
from cosmos_rl_core.datasets._reference_pixels import decoded
from cosmos_rl_core.datasets._references import bytes_of
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.media import encode


def picture(path: Path, seed: int, size: tuple[int, int] = (20, 30)) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def test_ids_without_references_depend_on_the_text_alone():
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


def test_a_clip_is_a_reference_of_its_last_frames(tmp_path: Path):
    frames = np.random.default_rng(0).integers(0, 256, (7, 20, 30, 3), dtype=np.uint8)
    (tmp_path / "clip.mkv").write_bytes(data := encode(frames)[1])
    picture(tmp_path / "a.png", 0)
    one, still = read_prompts(
        written(tmp_path, {"prompt": "x", "references": ["clip.mkv"]}, {"prompt": "x", "references": ["a.png"]})
    )
    (clip,) = one.references
    assert (clip.frames, clip.height, clip.width, clip.digest) == (5, 20, 30, hashlib.sha256(data).hexdigest())
    assert np.array_equal(decoded(bytes_of(clip)), frames[2:])
    assert one.identity()["references"][0]["frames"] == 5
    assert "frames" not in still.identity()["references"][0]


@pytest.mark.parametrize(
    ("kept", "said"),
    [(lambda data: data[:-200], "decoded|damaged|frames"), (lambda _: b"0" * 99, "no picture and no clip")],
)
def test_a_truncated_clip_and_a_file_that_is_no_clip_are_refused(kept: Callable[[bytes], bytes], said: str):
    frames = np.random.default_rng(0).integers(0, 256, (5, 20, 30, 3), dtype=np.uint8)
    with pytest.raises(ValueError, match=said):
        decoded(kept(encode(frames)[1]))


def test_a_clip_of_too_few_frames_is_refused():
    frames = np.random.default_rng(0).integers(0, 256, (4, 20, 30, 3), dtype=np.uint8)
    with pytest.raises(ValueError, match="a clip of 4 frames; expected 5 or more"):
        decoded(encode(frames)[1])


def test_the_same_picture_elsewhere_is_the_same_prompt(tmp_path: Path):
    found: list[str] = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        picture(tmp_path / name / "a.png", 0)
        found += [one.id for one in read_prompts(written(tmp_path / name, {"prompt": "x", "references": ["a.png"]}))]
    assert found[0] == found[1]


def test_all_references_that_cannot_be_used_are_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_reference_pixels, "MOST_PIXELS", 100 * 100)
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
    assert "cut.png: cannot be read: " in lines
    assert "text.png: no picture and no clip that can be decoded; expected one of JPEG" in lines
    assert "line 6: expected \"references\" to be a list of paths of pictures or clips, found 'whole.png'" in lines
    assert "line 7: expected at most 8 references, found 9" in lines


def rows_of(folder: Path, texts: list[str], given: Any, name: str = "references") -> Path:
    """Rows of texts with pictures, two a batch."""
    return save(folder, {"text": pa.array(texts), name: given}, {}, files=2)


def prompts_in(folder: Path | str, **settings: Any) -> tuple[Prompt, ...]:
    return hf.prompts(hf.Options.model_validate({"name": "hf", "local_dir": str(folder)} | settings))


def lists(*rows: Sequence[bytes | None] | None) -> pa.Array:
    values = [None if row is None else [{"bytes": data, "path": "a.png"} for data in row] for row in rows]
    return pa.array(values, pa.list_(MEDIUM))


def told(prompts: Iterable[Prompt]) -> list[tuple[Any, ...]]:
    return [(one.id, one.text, [(r.digest, r.height, r.width) for r in one.references]) for one in prompts]


@pytest.mark.parametrize("given", [[[0], [1], [2], [0]], [[0, 2], [1, 3], [2, 0], [0, 2]]], ids=["one", "two"])
def test_lines_objects_and_rows_of_the_same_texts_and_pictures_are_the_same_prompts(
    given: list[list[int]], tmp_path: Path
):
    files = [picture(tmp_path / f"{n}.png", n, (20, 30 + n)) for n in range(4)]
    texts = ["a hat", "a hat", "at night", "b"]
    rows = [{"prompt": t, "references": [files[n].name for n in some]} for t, some in zip(texts, given, strict=True)]
    expected = told(read_prompts(written(tmp_path, *rows)))
    (tmp_path / "prompts.json").write_text(json.dumps(rows), encoding="utf-8")
    assert told(read_prompts(tmp_path / "prompts.json")) == expected
    data = [[files[n].read_bytes() for n in some] for some in given]
    found = prompts_in(rows_of(tmp_path / "lists", texts, lists(*data)))
    assert told(found) == expected
    assert [[bytes_of(reference) for reference in one.references] for one in found] == data
    assert all(one.metadata == {} for one in found)
    large = rows_of(tmp_path / "large", texts, lists(*data).cast(pa.large_list(MEDIUM)), "pictures")
    assert told(prompts_in(large, references_column="pictures")) == expected
    if len(given[0]) == 1:
        assert told(prompts_in(rows_of(tmp_path / "single", texts, media([one for (one,) in data])))) == expected


def test_rows_may_be_in_s3(tmp_path: Path, s3_url: str):
    data = picture(tmp_path / "a.png", 0).read_bytes()
    here = rows_of(tmp_path / "rows", ["x", "y"], lists([data], [data]))
    for file in here.iterdir():
        store.write(f"{s3_url}/references/{file.name}", file.read_bytes())
    there = prompts_in(f"{s3_url}/references")
    assert told(there) == told(prompts_in(here))
    assert [bytes_of(one.references[0]) for one in there] == [data, data]
    assert there[0].references[0].source.startswith(s3_url)


def test_rows_without_pictures_are_prompts_of_texts_alone(tmp_path: Path):
    data = picture(tmp_path / "a.png", 0).read_bytes()
    found = prompts_in(rows_of(tmp_path / "lists", ["x", "y", "z"], lists([data], None, [])))
    assert [len(one.references) for one in found] == [1, 0, 0]
    assert [one.id for one in found[1:]] == [prompt_id("y"), prompt_id("z")]
    single = pa.concat_arrays([media([data]), pa.nulls(1, MEDIUM)])
    assert [len(one.references) for one in prompts_in(rows_of(tmp_path / "single", ["x", "y"], single))] == [1, 0]
    assert [one.references for one in prompts_in(rows_of(tmp_path / "other", ["x"], media([data]), "image"))] == [()]


def test_all_rows_whose_references_cannot_be_used_are_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_reference_pixels, "MOST_PIXELS", 100 * 100)
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    whole, huge = (picture(tmp_path / f"{n}.png", n, size).read_bytes() for n, size in enumerate([(9, 9), (101, 100)]))
    moving = (tmp_path / "moving.gif").read_bytes()
    rows = lists([whole, None], [moving], [whole, huge], [whole[: len(whole) // 2]], [whole] * 9, [whole])
    with pytest.raises(ConfigError) as caught:
        prompts_in(rows_of(tmp_path / "rows", ["x", "x", "x", "x", "x", "x"], rows))
    first, second = (f"data-0000{n}-of-00002.arrow" for n in (0, 1))
    lines = str(caught.value)
    assert f"{first}, row 0: reference 2: no bytes; a path alone is not read" in lines
    assert f"{first}, row 1: reference 1: an animation of 2 pictures; expected one picture" in lines
    assert f"{first}, row 2: reference 2: 101 x 100 pixels, at most 10000 are taken" in lines
    assert f"{second}, row 0: reference 1: cannot be read" in lines
    assert f"{second}, row 1: expected at most 8 references, found 9" in lines
    assert f"{second}, row 2" not in lines


def test_a_column_of_something_else_holds_no_references(tmp_path: Path):
    paths = rows_of(tmp_path / "paths", ["x"], pa.array([["a.png"]]))
    with pytest.raises(ConfigError, match=r"row 0: .references. are paths, which only prompts in a file"):
        prompts_in(paths)
    with pytest.raises(ConfigError, match=r"needs images or lists of them in the column \(text\); it has: text"):
        prompts_in(paths, references_column="text")
    with pytest.raises(ConfigError, match="set references_column"):
        prompts_in(rows_of(tmp_path / "bytes", ["x"], pa.array([b"png"])))


def test_prompts_that_come_from_no_file_have_no_references():
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


def test_each_file_of_a_folder_is_a_prompt_whose_references_are_relative_to_it(tmp_path: Path):
    data = [picture(tmp_path / name, seed).read_bytes() for seed, name in enumerate(("a.png", "b.png"))]
    rows: dict[str, Any] = {
        "1.json": {"prompt": "x", "references": ["b.png"], "difficulty": 2},
        "0.json": {"prompt": "x", "references": ["a.png"]},
        "3.JSON": {"prompt": "x", "references": ["./a.png"]},
    }
    for name, row in rows.items():
        (tmp_path / name).write_text(json.dumps(row), encoding="utf-8")
    (tmp_path / "2.txt").write_text("two\nlines\n", encoding="utf-8")
    (tmp_path / ".hidden.txt").write_text("hidden", encoding="utf-8")
    (tmp_path / "readme.md").write_text("no prompt", encoding="utf-8")
    found = read_prompts(tmp_path)
    digests = [hashlib.sha256(one).hexdigest() for one in data]
    expected = [("x", digests[:1]), ("x", digests[1:]), ("two\nlines", [])]
    assert [(one.text, [ref.digest for ref in one.references]) for one in found] == expected
    assert [one.id for one in found] == [prompt_id(text, some) for text, some in expected]
    assert found[1].metadata == {"difficulty": 2}
    (tmp_path / "4.json").write_text('{"prompt": "x", "references": ["c.png"]}', encoding="utf-8")
    (tmp_path / "5.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_prompts(tmp_path)
    assert f"4.json: no file at {tmp_path / 'c.png'}" in str(caught.value)
    assert '5.json: expected an object with the text "prompt"' in str(caught.value)


def test_all_mistakes_of_a_folder_of_prompts_are_named_at_once(tmp_path: Path):
    (tmp_path / "a.txt").write_text("a cat", encoding="utf-8")
    for name in ("b.txt", "c.txt"):
        (tmp_path / name).write_bytes(b"\xff\xfe\xfa")
    (tmp_path / "d.txt").write_text(" \n", encoding="utf-8")
    (tmp_path / "e.json").write_text('[{"prompt": "x"}]', encoding="utf-8")
    (tmp_path / "f.json").write_text('{"text": "x"}', encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_prompts(tmp_path)
    said = str(caught.value)
    assert f"{tmp_path / 'b.txt'} cannot be read" in said
    assert f"{tmp_path / 'c.txt'} cannot be read" in said
    assert "d.txt: an empty file; expected one prompt" in said
    assert "e.json: a list; in a folder each file has one prompt" in said
    assert 'f.json: expected an object with the text "prompt"' in said


def test_a_folder_without_prompts_says_which_files_count(tmp_path: Path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}', encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"no file with a prompt; expected \.txt with a text or \.json with an object"
    ):
        read_prompts(tmp_path)
