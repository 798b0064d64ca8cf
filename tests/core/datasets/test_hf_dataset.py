"""Folders of Hugging Face's ``datasets``: rows, their bytes and their prompts, and files that are not whole."""

import io
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from cosmos_rl_core.conformance.kinds.hf_folder import MEDIUM, media, save, save_splits
from cosmos_rl_core.datasets import hf
from cosmos_rl_core.datasets._base import ItemError, prompt_id
from cosmos_rl_core.datasets._references import decoded
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.media import encode

IMAGE = {"image": {"_type": "Image"}}


def png(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


PICTURES = [png(seed) for seed in range(5)]


def pictures(folder: Path, **writing: Any) -> Path:
    """Five captioned images in two files."""
    columns = {
        "image": media(PICTURES),
        "text": pa.array([f"picture {n} " for n in range(5)]),
        "label": pa.array(range(5)),
        "score": pa.array([0.5, float("nan"), None, 1.0, 2.0]),
    }
    return save(folder, columns, IMAGE, files=2, **writing)


def source(folder: Path | str, **settings: Any) -> hf.Source:
    found = hf.Source(hf.Options.model_validate({"name": "hf", "local_dir": str(folder)} | settings))
    found.stamps()
    return found


def texts(folder: Path, **settings: Any) -> list[str]:
    options = hf.Options.model_validate({"name": "hf", "local_dir": str(folder)} | settings)
    return [prompt.text for prompt in hf.prompts(options)]


def check_pictures(found: hf.Source) -> None:
    units = [*found.stamps()]
    assert units == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    items = [item for unit in units for item in found.items(unit)]
    assert [item.name for item in items] == [
        "data-00000-of-00002-000000",
        "data-00000-of-00002-000001",
        "data-00001-of-00002-000000",
        "data-00001-of-00002-000001",
        "data-00001-of-00002-000002",
    ]
    assert [(item.kind, item.caption) for item in items] == [("image", f"picture {n}") for n in range(5)]
    assert [item.metadata for item in items] == [
        {"label": 0, "score": 0.5},
        {"label": 1},
        {"label": 2},
        {"label": 3, "score": 1.0},
        {"label": 4, "score": 2.0},
    ]
    assert [found.open(item.name).read() for item in reversed(items)] == PICTURES[::-1]


def test_each_row_has_its_caption_and_the_bytes_of_its_medium(tmp_path: Path):
    check_pictures(source(pictures(tmp_path)))
    # Without a listing of the file before.
    assert source(tmp_path).open("data-00001-of-00002-000001").read() == PICTURES[3]
    with pytest.raises(KeyError):
        source(tmp_path).open("data-00001-of-00002-000003")
    with pytest.raises(FileNotFoundError):
        source(tmp_path).open("data-00002-of-00002-000000")


def test_folders_may_be_in_s3(tmp_path: Path, s3_url: str):
    for file in pictures(tmp_path / "there").iterdir():
        store.write(f"{s3_url}/hf/{file.name}", file.read_bytes())
    check_pictures(source(f"{s3_url}/hf"))


def test_rows_without_bytes_or_caption_are_told_apart_from_damage(tmp_path: Path):
    columns = {
        "image": pa.concat_arrays([media([PICTURES[0], None, b""]), pa.nulls(1, MEDIUM)]),
        "caption": pa.array(["a", None, "  ", "d"]),
    }
    found = source(save(tmp_path, columns, IMAGE, rows_per_batch=4))
    items = found.items("data-00000-of-00001.arrow")
    assert [item.caption for item in items] == ["a", None, None, "d"]
    assert found.open(items[0].name).read() == PICTURES[0]
    assert found.open(items[2].name).read() == b""
    for row in (1, 3):
        with pytest.raises(ItemError, match="no bytes in column image; a path alone is not read"):
            found.open(items[row].name)


@pytest.mark.parametrize("values", [[b"", b""], [None, None], []])
def test_batches_without_bytes_or_rows_are_not_damaged(tmp_path: Path, values: list[bytes | None]):
    save(tmp_path, {"image": media(values), "text": pa.array(["a"] * len(values), pa.string())}, IMAGE)
    if not values:
        schema = pa.schema([("image", MEDIUM), ("text", pa.string())])
        with (
            pa.OSFile(str(tmp_path / "data-00000-of-00001.arrow"), "wb") as sink,
            pa.ipc.new_stream(sink, schema) as to,
        ):
            to.write_batch(pa.record_batch([media([]), pa.array([], pa.string())], schema=schema))
    items = source(tmp_path).items("data-00000-of-00001.arrow")
    assert [item.caption for item in items] == ["a"] * len(values)


def test_the_first_frame_of_each_video_can_be_its_reference(tmp_path: Path):
    frames = np.random.default_rng(0).integers(0, 256, (5, 32, 48, 3), dtype=np.uint8)
    row = {"bytes": PICTURES[0], "path": ""}
    columns = {
        "clip": media([encode(frames)[1], encode(frames[1:])[1], encode(frames)[1], b"damaged"]),
        "text": pa.array("abcd"),
        "references": pa.array([[], [], [row], []], pa.list_(MEDIUM)),
    }
    save(tmp_path / "clips", columns, {"clip": {"_type": "Video"}})
    found = source(tmp_path / "clips", first_frame=True, size=[32, 48])
    read: list[Any] = []
    for item in found.items("data-00000-of-00001.arrow"):
        try:
            read += [decoded(picture.data) for picture in found.references(item)]
        except ItemError as error:
            read.append(str(error))
    assert np.array_equal(read[:2], [frames[:1], frames[1:2]])
    assert read[2] == "the row has references; leave first_frame out, or the references"
    assert len(read) == 4
    assert read[3].startswith("cannot be read: ")
    with pytest.raises(ConfigError, match="rows of prompts have no first frames; prepare a dataset from them"):
        texts(tmp_path / "clips", first_frame=True)
    with pytest.raises(ConfigError, match="the column image has images; first_frame takes videos here"):
        source(pictures(tmp_path / "pictures"), first_frame=True)


def test_options_without_first_frames_are_as_in_earlier_versions(tmp_path: Path):
    names = ("name", "split", "caption_column", "media_column")
    assert hf.Options(local_dir=str(tmp_path)).identity() == {name: "hf" if name == "name" else "" for name in names}


def test_videos_and_large_binaries_are_media_too(tmp_path: Path):
    kind = pa.struct([("path", pa.string()), ("bytes", pa.large_binary())])
    clips = pa.array([{"bytes": b"abc", "path": None}, {"bytes": b"de", "path": None}], kind)
    columns = {"clip": clips, "thumbnail": media(PICTURES[:2]), "prompt": pa.array(["a", "b"])}
    features = {"clip": {"_type": "Video"}, "thumbnail": {"_type": "Image"}}
    folder = save(tmp_path, columns, features)
    with pytest.raises(
        ConfigError, match=r"needs one media column \(clip or thumbnail\); it has: clip \(Video\), thumb"
    ):
        source(folder)
    found = source(folder, media_column="clip")
    items = found.items("data-00000-of-00001.arrow")
    assert [(item.kind, found.open(item.name).read()) for item in items] == [("video", b"abc"), ("video", b"de")]


def test_memory_holds_one_batch_at_a_time(tmp_path: Path):
    """The file has 64 MB in batches of 4 MB."""
    columns = {"image": media([bytes(2**22)] * 16), "text": pa.array(["a"] * 16)}
    save(tmp_path, columns, IMAGE, rows_per_batch=1)
    script = (
        "import resource, sys\nfrom cosmos_rl_core.datasets import hf\n"
        "s = hf.Source(hf.Options(local_dir=sys.argv[1]))\nunit, = s.stamps()\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "before = peak()\ncount = len(s.items(unit))\nprint(count, peak() - before)"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    count, grown_mb = map(int, ended.stdout.split())
    assert count == 16
    assert grown_mb < 32


def test_text_alone_is_a_set_of_prompts_with_metadata(tmp_path: Path):
    include = pa.struct([("class", pa.string()), ("count", pa.int64()), ("color", pa.string())])
    columns = {
        "prompt": pa.array(["two cats", " a dog", "two cats"]),
        "include": pa.array(
            [[{"class": "cat", "count": 2}], [{"class": "dog", "color": "red"}], None], pa.list_(include)
        ),
        "when": pa.array([0, 1, 2], pa.timestamp("s")),
    }
    found = hf.prompts(hf.Options(local_dir=str(save(tmp_path, columns, {}, files=3))))
    assert [(prompt.id, prompt.text) for prompt in found[:2]] == [(prompt_id(t), t) for t in ("two cats", "a dog")]
    assert [prompt.metadata for prompt in found] == [
        {"include": [{"class": "cat", "count": 2}]},
        {"include": [{"class": "dog", "color": "red"}]},
        {},
    ]
    assert found[2].id != found[0].id


def test_a_split_is_chosen_by_name(tmp_path: Path):
    folder = save_splits(tmp_path, train={"text": pa.array(["a"])}, test={"text": pa.array(["b", "c"])})
    assert (texts(folder, split="train"), texts(folder, split="test")) == (["a"], ["b", "c"])
    for split in ("", "validation"):
        with pytest.raises(ConfigError, match=f"split = '{split}'; expected one of train, test"):
            texts(folder, split=split)
    with pytest.raises(ConfigError, match="has no splits; leave split = 'test' out"):
        texts(folder / "test", split="test")
    assert texts(save_splits(tmp_path / "one", only={"text": pa.array(["a"])})) == ["a"]


def test_the_caption_is_the_first_known_column_or_the_one_that_is_named(tmp_path: Path):
    columns = {"caption": pa.array(["c"]), "text": pa.array(["t"]), "prompt": pa.array([7])}
    folder = save(tmp_path, columns, {})
    assert texts(folder) == ["t"]
    assert texts(folder, caption_column="caption") == ["c"]
    for column, wanted in (("title", "title"), ("prompt", "prompt")):
        says = rf"text column \({wanted}\); it has: caption \(Value\), text \(Value\), prompt \(Value\); set caption_"
        with pytest.raises(ConfigError, match=says):
            texts(folder, caption_column=column)
    with pytest.raises(ConfigError, match="needs one media column; it has: caption"):
        source(folder)


def test_every_row_without_a_prompt_is_named_at_once(tmp_path: Path):
    folder = save(tmp_path, {"text": pa.array(["a", None, " ", "b"])}, {})
    with pytest.raises(ConfigError, match=r"arrow, row 1: expected(.|\n)*arrow, row 2: expected"):
        texts(folder)


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.arrow"))


def test_files_that_state_does_not_name_come_from_an_earlier_save(tmp_path: Path):
    save(tmp_path, {"text": pa.array(["old", "older"])}, {}, files=2)
    save(tmp_path, {"text": pa.array(["new"])}, {})
    assert len(files_of(tmp_path)) == 3
    assert texts(tmp_path) == ["new"]


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("state.json", b"{", "is not what `datasets` writes"),
        ("state.json", b'{"_data_files": []}', "has no Arrow file"),
        ("state.json", b'{"_data_files": [{"filename": "../x.arrow"}]}', r"lacks files .*: \.\./x\.arrow"),
        ("dataset_info.json", b'{"features": null}', "is not what `datasets` writes"),
        ("dataset_dict.json", b'{"splits": []}', "is not what `datasets` writes"),
        ("dataset_dict.json", b'{"splits": ["train"]}', r"no file at .*train/state\.json"),
        ("data-00000-of-00002.arrow", b"", "ends early"),
        ("data-00000-of-00002.arrow", b"PK\x03\x04" * 99, "ends early|cannot be read"),
        ("data-00000-of-00002.arrow", b"\xff\xff\xff\xff\0\0\0\0", "no schema"),
    ],
)
def test_folders_in_another_layout_are_refused(tmp_path: Path, name: str, data: bytes, says: str):
    folder = pictures(tmp_path)
    (folder / name).write_bytes(data)
    with pytest.raises(ConfigError, match=says):
        source(folder)


def test_a_folder_that_holds_no_complete_dataset_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="has neither; expected a folder that save_to_disk"):
        source(tmp_path)
    with pytest.raises(ConfigError, match="no folder at"):
        source(tmp_path / "away")
    (pictures(tmp_path) / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(ConfigError, match=r"lacks files that its state\.json names: data-00001-of-00002\.arrow"):
        source(tmp_path)


def test_a_file_that_ends_early_anywhere_is_damage(tmp_path: Path):
    folder = pictures(tmp_path)
    found, unit = source(folder), "data-00001-of-00002.arrow"
    whole = (folder / unit).read_bytes()
    schema = len(whole) - whole[::-1].index(b"\0\0\0\0\xff\xff\xff\xff")
    for size in (*range(0, len(whole), 97), schema - 8, len(whole) - 8, len(whole) - 1):
        (folder / unit).write_bytes(whole[:size])
        with pytest.raises(ItemError, match="ends early"):
            found.items(unit)


def test_damaged_bytes_never_end_the_process_or_show_bytes_of_elsewhere(tmp_path: Path):
    folder = pictures(tmp_path)
    found, unit = source(folder), "data-00000-of-00002.arrow"
    whole = (folder / unit).read_bytes()
    rng, refused = np.random.default_rng(0), 0
    for _ in range(150):
        damaged = bytearray(whole)
        at = int(rng.integers(len(whole) - 4))
        damaged[at : at + 4] = struct.pack("<i", int(rng.choice([-1, 0, 2**31 - 1, 2**24, 7])))
        (folder / unit).write_bytes(damaged)
        try:
            for item in found.items(unit):
                assert len(found.open(item.name).read()) <= len(whole)
        except ItemError:
            refused += 1
    assert refused > 20


def test_compressed_files_and_other_columns_are_refused(tmp_path: Path):
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    found = source(pictures(tmp_path / "zstd", options=options))
    with pytest.raises(ItemError, match="compressed; save the dataset without compression"):
        found.items("data-00000-of-00002.arrow")
    found = source(pictures(tmp_path / "other"))
    save(tmp_path / "new", {"image": media(PICTURES[:1]), "caption": pa.array(["a"])}, IMAGE)
    os.replace(tmp_path / "new/data-00000-of-00001.arrow", tmp_path / "other/data-00001-of-00002.arrow")
    with pytest.raises(ItemError, match="its columns differ from the first file's"):
        found.items("data-00001-of-00002.arrow")


def test_the_path_of_the_folder_is_no_part_of_a_runs_identity():
    assert hf.Options(local_dir="a").identity() == hf.Options(local_dir="b").identity()
    assert json.dumps(hf.Options(local_dir="a").identity()) != json.dumps(
        hf.Options(local_dir="a", split="x").identity()
    )


def test_the_column_of_references_is_no_column_of_media(tmp_path: Path):
    features = {"image": {"_type": "Image"}, "references": {"_type": "Image"}}
    columns = {"image": media(PICTURES[:2]), "references": media(PICTURES[2:4]), "text": pa.array(["a", "b"])}
    save(tmp_path, columns, features)
    for settings in ({}, {"media_column": "image", "references_column": "references"}):
        found = source(tmp_path, **settings)
        (unit,) = found.stamps()
        for number, item in enumerate(found.items(unit)):
            assert found.open(item.name).read() == PICTURES[number]
            assert [one.data for one in found.references(item)] == [PICTURES[2 + number]]
    assert texts(tmp_path) == ["a", "b"]
    with pytest.raises(ConfigError, match="needs one media column"):
        source(tmp_path, media_column="references")
