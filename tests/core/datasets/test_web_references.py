"""Samples of tars whose captions refer to other files of the sample, or whose first frames are references."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.datasets import _sources
from cosmos_rl_core.datasets._base import ItemError, prompt_id
from cosmos_rl_core.datasets._reference_pixels import decoded
from cosmos_rl_core.datasets._references import bytes_of
from cosmos_rl_core.datasets.web import Options, Source, prompts
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage import media
from tests.file_server import serving
from tests.tar_files import shard


def picture(seed: int, size: tuple[int, int] = (16, 24), **options: Any) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", **options)
    return buffer.getvalue()


def clip(seed: int) -> tuple[np.ndarray, bytes]:
    """Frames, and a video of exactly these."""
    frames = np.random.default_rng(seed).integers(0, 256, (5, 32, 48, 3), dtype=np.uint8)
    extension, data = media.encode(frames)
    assert extension == "mkv"
    return frames, data


def about(text: str, *references: str) -> bytes:
    return json.dumps({"prompt": text, "references": references}).encode()


EDITS = {
    "0.png": picture(0), "0.json": about("a hat", "source.png"), "0.source.png": picture(1),
    "1.png": picture(0), "1.json": about("a hat", "Source.JPG", "mask.png"),
    "1.source.jpg": picture(2), "1.mask.png": picture(3),
    "2.png": picture(0), "2.json": b'{"prompt": "a hat"}', "2.source.png": picture(4),
    "3.png": picture(5), "3.json": about("a hat", "source.png"), "3.source.png": picture(1),
}  # fmt: skip


def options_of(folder: Path, files: dict[str, bytes], **settings: Any) -> Options:
    (folder / "0.tar").write_bytes(shard(files))
    return Options(urls=(str(folder / "0.tar"),), **settings)


def read(options: Options) -> dict[str, list[bytes] | str]:
    """The bytes of the references of each item, or why it has none."""
    source = Source(options)
    found: dict[str, list[bytes] | str] = {}
    for unit in source.stamps():
        for item in source.items(unit):
            try:
                found[item.name] = [data for _, data in _sources.references_of(source, item)]
            except ItemError as error:
                found[item.name] = str(error)
    return found


def test_a_caption_names_files_of_its_sample_by_their_extensions(tmp_path: Path):
    found = read(options_of(tmp_path, EDITS))
    expected = [[picture(1)], [picture(2), picture(3)], [], [picture(1)]]
    assert found == {f"0.tar/{number}": some for number, some in enumerate(expected)}


def test_prompts_are_texts_and_pictures_whose_bytes_are_found_again_in_the_tar(tmp_path: Path):
    found = prompts(options_of(tmp_path, EDITS))
    digests = [sha256(picture(seed)) for seed in range(4)]
    referred = [digests[1:2], digests[2:4], []]
    assert [prompt.id for prompt in found] == [prompt_id("a hat", some) for some in referred]
    for prompt, some in zip(found, referred, strict=True):
        assert [sha256(bytes_of(one)) for one in prompt.references] == some
        assert all((one.height, one.width) == (16, 24) for one in prompt.references)


def test_a_reference_may_be_named_as_its_file_is(tmp_path: Path):
    named = ["0.source.png", ".source.png", "b/0.Source.png", "0.png", "1.source.png", "b/1.source.png"]
    files = {"b/0.source.png": picture(1), "b/0.0.png": picture(2)}
    found: list[Any] = []
    for name in named:
        options = options_of(tmp_path, files | {"b/0.jpg": picture(0), "b/0.json": about("a hat", name)})
        found.append(read(options)["0.tar/b/0"])
    said = "b/0: no reference {} in the sample; name one by its extension: source.png, 0.png, jpg, json"
    assert found == [[picture(1)]] * 3 + [[picture(2)]] + [said.format(name) for name in named[4:]]


def test_references_are_read_of_json_next_to_a_text_and_nothing_else_is(tmp_path: Path):
    files = {"9.json": b'{"prompt": 1, "similarity": NaN, "about": "references"}'}
    for name, data in EDITS.items():
        files |= {name: data} | ({f"{name[0]}.txt": f"text {name[0]}".encode()} if name.endswith(".json") else {})
    for number, other in ((7, b'{"references": "Smith 2001"}'), (8, b"{")):
        files |= {f"{number}.png": picture(0), f"{number}.txt": f"text {number}".encode(), f"{number}.json": other}
    files |= {"9.png": picture(0), "9.txt": b"text 9"}
    files["3.json"] = b'{"similarity": NaN, "references": ["source.png"]}'
    options = options_of(tmp_path, files)
    expected = {"0": [picture(1)], "1": [picture(2), picture(3)], "2": [], "3": [picture(1)]} | {n: [] for n in "789"}
    assert read(options) == {f"0.tar/{key}": some for key, some in expected.items()}
    source = Source(options)
    items = [item for unit in source.stamps() for item in source.items(unit)]
    named = {"0": ["source.png"], "1": ["Source.JPG", "mask.png"], "3": ["source.png"]}
    told = {f"0.tar/{key}": (f"text {key}", {"references": named[key]} if key in named else {}) for key in expected}
    assert {item.name: (item.caption, item.metadata) for item in items} == told
    (tmp_path / "0.tar").write_bytes(shard({"0.txt": b"x", "0.png": picture(0), "0.json": b'{"references": [}'}))
    source = Source(options)
    (item,) = (item for unit in source.stamps() for item in source.items(unit))
    with pytest.raises(ItemError, match=r"0\.json: cannot be read: "):
        source.open(item.name)


def test_prompts_need_no_media_but_for_first_frames(tmp_path: Path):
    files = {
        "0.source.png": picture(1), "0.json": about("a hat", "source.png"),
        "1.before.png": picture(2), "1.txt": b"a coat", "1.json": b'{"references": ["before.png"]}',
        "2.png": picture(3), "2.jpg": picture(4), "2.txt": b"two media",
        "3.png": b"damaged", "3.txt": b"a text",
    }  # fmt: skip
    found = prompts(options_of(tmp_path, files))
    digests = {"a hat": [sha256(picture(1))], "a coat": [sha256(picture(2))], "two media": [], "a text": []}
    assert [prompt.id for prompt in found] == [prompt_id(text, some) for text, some in digests.items()]
    assert [bytes_of(one) for prompt in found for one in prompt.references] == [picture(1), picture(2)]
    with pytest.raises(ConfigError) as raised:
        prompts(options_of(tmp_path, {"0.txt": b"a clip", "1.json": b"{}"}, first_frame=True))
    assert str(raised.value).splitlines()[1:] == [
        "    0.tar: 0: no image or video, only txt",
        '    0.tar: 1.json: no caption; expected an object with the text "prompt"',
    ]


def test_references_that_cannot_be_used_leave_out_their_sample_alone(tmp_path: Path):
    frames = [Image.fromarray(np.full((8, 8, 3), grey, np.uint8)) for grey in (0, 255)]
    animated = io.BytesIO()
    frames[0].save(animated, "PNG", save_all=True, append_images=frames[1:])
    bad = {"missing": None, "broken": b"no picture", "animated": animated.getvalue(), "whole": picture(1)}
    files: dict[str, bytes] = {}
    for name, data in bad.items():
        files |= {f"{name}.jpg": picture(0), f"{name}.json": about(name, "ref.png")}
        files |= {} if data is None else {f"{name}.ref.png": data}
    files |= {"many.jpg": picture(0), "many.json": about("many", *["ref.png"] * 9), "many.ref.png": picture(1)}
    options = options_of(tmp_path, files)
    found = {name.removeprefix("0.tar/"): value for name, value in read(options).items()}
    assert found.pop("whole") == [picture(1)]
    assert found["missing"] == "missing: no reference ref.png in the sample; name one by its extension: jpg, json"
    assert str(found["broken"]).startswith("broken.ref.png: no picture and no clip that can be decoded")
    assert str(found["animated"]).startswith("animated.ref.png: an animation of 2 pictures")
    assert found["many"] == "many: expected at most 8 references, found 9"
    with pytest.raises(ConfigError) as raised:
        prompts(options)
    assert len(str(raised.value).splitlines()) == 5


def test_the_first_frame_of_a_video_can_be_its_reference(tmp_path: Path):
    frames, data = clip(0)
    files = {"0.mkv": data, "0.txt": b"a clip", "1.png": picture(0), "1.txt": b"a picture"}
    options = options_of(tmp_path, files, first_frame=True, size=(32, 48))
    found = read(options)
    (first,) = found["0.tar/0"]
    assert found["0.tar/1"] == "1: an image; first_frame takes videos here"
    assert isinstance(first, bytes)
    assert np.array_equal(decoded(first), frames[:1])
    with pytest.raises(ConfigError, match="1: an image; first_frame takes videos here"):
        prompts(options)
    (prompt,) = prompts(options_of(tmp_path, {"0.mkv": data, "0.txt": b"a clip"}, first_frame=True, size=(32, 48)))
    assert prompt.id == prompt_id("a clip", [sha256(first)])
    assert bytes_of(prompt.references[0]) == first
    both = {"0.mkv": data, "0.json": about("a clip", "ref.png"), "0.ref.png": picture(0)}
    said = "0: its caption names references; leave first_frame out, or the references"
    assert read(options_of(tmp_path, both, first_frame=True)) == {"0.tar/0": said}


def test_tars_at_urls_are_read_and_no_run_reads_them_again():
    with serving() as server:
        server.files = {"/0.tar": shard(EDITS)}
        options = Options(urls=(f"{server.url}/0.tar",))
        assert read(options)["0.tar/0"] == [picture(1)]
        with pytest.raises(ConfigError, match=r"1: references in tars at http\(s\) URLs are kept by cosmos-flows"):
            prompts(options)


def test_options_without_first_frames_are_as_in_earlier_versions():
    assert Options(urls=("0.tar",)).identity() == {"name": "web", "medium": None, "caption": None, "caption_key": None}
