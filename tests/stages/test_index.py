"""Parts of a dataset: what is read, what is new, what has gone, and what cannot be used."""

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.conformance.kinds import hf_folder
from cosmos_rl_core.datasets import _sources, hf
from cosmos_rl_core.datasets._base import prompt_id
from cosmos_rl_core.datasets.local import Options
from cosmos_rl_core.errors import DatasetError
from cosmos_rl_core.storage import media, store
from stages import contracts, index
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Input, Request
from stages.artifacts.slots import input_of
from stages.formats.parts import Parts
from stages.formats.tables import read_table
from tests.stages.conftest import make

SIZE = (20, 30)


def image(path: Path, seed: int, size: tuple[int, int] = SIZE, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, **options)


def video(path: Path, seed: int, frames: int, fps: int = 12) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (frames, 32, 48, 3), dtype=np.uint8)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
        for picture in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))


def caption(folder: Path, stem: str, text: str) -> None:
    path = folder / "metas" / f"{stem}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five images with captions; two have one caption."""
    folder = tmp_path / "source"
    for number in range(5):
        image(folder / "images" / f"{number:04d}.png", number)
        caption(folder, f"{number:04d}", f"picture {number // 2}")
    return folder


class Dataset:
    """A dataset on one source; its parts are made in turn."""

    def __init__(self, folder: Path, tmp_path: Path, **settings: Any) -> None:
        self.sources: dict[str, DatasetOptions] = {"mine": Options(local_dir=str(folder))}
        self.settings, self.tmp_path = settings, tmp_path
        self.parts: list[Input] = []

    def request(self) -> Request:
        sources = {name: _sources.source_of(options) for name, options in self.sources.items()}
        stamps = _sources.digest(_sources.stamps(sources))
        config = contracts.Index(sources=self.sources, stamps=stamps, **self.settings)
        slot = store.join(str(self.tmp_path), "store", "dataset", f"part-{len(self.parts)}")
        return Request(stage="index", slot=slot, seed=0, config=config, inputs={"parts": tuple(self.parts)})

    def make(self) -> dict[str, Any]:
        """Make the next part; return its summary."""
        request = self.request()
        manifest = make(request, self.tmp_path)
        self.parts.append(input_of(request.slot))
        return {name: count for name, count in manifest.summary.items() if name != "seconds"}

    @property
    def all(self) -> Parts:
        return Parts([Artifact(part) for part in self.parts])

    def left_out(self) -> Any:
        """What the last part left out."""
        return read_table(Artifact(self.parts[-1]), contracts.Index.LEFT_OUT)


def counts(items: int = 0, removed: int = 0, left_out: int = 0, units_read: int = 0) -> dict[str, int]:
    return {"items": items, "removed": removed, "left_out": left_out, "units_read": units_read}


def test_items_are_known_by_the_digests_of_their_bytes_and_captions(folder: Path, tmp_path: Path):
    dataset = Dataset(folder, tmp_path)
    assert dataset.make() == counts(items=5, units_read=5)
    items = dataset.all.items
    assert items["name"].tolist() == [f"{number:04d}" for number in range(5)]
    assert items["medium"].tolist() == [sha256(path.read_bytes()) for path in sorted((folder / "images").iterdir())]
    assert items["prompt_id"].tolist() == [prompt_id(f"picture {number // 2}") for number in range(5)]
    assert items[["height", "width", "frames"]].drop_duplicates().to_numpy().tolist() == [[*SIZE, 1]]
    assert items["new_medium"].all()
    assert items["new_prompt"].tolist() == [True, False, True, False, True]


def test_a_part_reads_what_changed_and_nothing_else(folder: Path, tmp_path: Path):
    dataset = Dataset(folder, tmp_path)
    dataset.make()
    assert dataset.make() == counts()

    image(folder / "images/0005.png", 5)
    caption(folder, "0005", "picture 0")  # a known caption
    shutil.copy(folder / "images/0000.png", folder / "images/0006.png")  # a known medium
    caption(folder, "0006", "another")
    caption(folder, "0001", "picture 0, edited")
    (folder / "images/0002.png").unlink()
    (folder / "metas/0002.txt").unlink()
    os.rename(folder / "images/0003.png", folder / "images/0007.png")
    os.rename(folder / "metas/0003.txt", folder / "metas/0007.txt")
    os.utime(folder / "images/0004.png")
    assert dataset.make() == counts(items=4, removed=3, units_read=5)

    new = dataset.all.items.query("part == 2").set_index("name")
    assert new["new_medium"].to_dict() == {"0001": False, "0005": True, "0006": False, "0007": False}
    assert new["new_prompt"].to_dict() == {"0001": True, "0005": False, "0006": True, "0007": False}
    assert sorted(dataset.all.items["name"]) == ["0000", "0001", "0004", "0005", "0006", "0007"]
    assert dataset.all.items["item"].is_unique
    assert dataset.make() == counts()


def test_an_item_that_comes_back_is_indexed_again(folder: Path, tmp_path: Path):
    dataset = Dataset(folder, tmp_path)
    dataset.make()
    first, file = dataset.all.items["item"].tolist(), folder / "metas/0000.txt"
    file.write_text("other", encoding="utf-8")
    dataset.make()
    assert dataset.all.items["item"].tolist() != first
    file.write_text("picture 0", encoding="utf-8")
    dataset.make()
    assert sorted(dataset.all.items["item"]) == sorted(first)


def test_unusable_items_are_left_out_with_the_reason_up_to_a_limit(folder: Path, tmp_path: Path):
    (folder / "images/0000.png").write_bytes((folder / "images/0000.png").read_bytes()[:200])
    (folder / "metas/0001.txt").write_text("  ", encoding="utf-8")
    image(folder / "images/0002.png", 2, (8, 30))
    image(folder / "images/0003.jpg", 3)
    (folder / "metas/0004.txt").unlink()
    image(folder / "images/a b.png", 4)
    with pytest.raises(DatasetError, match=r"5 of 6 items cannot be used, more than max_left_out = 0\.5"):
        Dataset(folder, tmp_path, max_left_out=0.5).make()

    dataset = Dataset(folder, tmp_path, max_left_out=1.0, min_size=(16, 16))
    assert dataset.make() == counts(left_out=6, units_read=6)
    table = dataset.left_out()
    reasons = dict(zip(table["name"], table["reason"], strict=True))
    assert reasons.keys() == {"0000", "0001", "0002", "0003", "0004", "a b"}
    assert "cannot be read" in reasons["0000"]
    assert reasons["0001"] == "0001.txt: the caption is empty"
    assert reasons["0002"] == "8 x 30 pixels, expected at least 16 x 16"
    assert reasons["0003"] == "0003.jpg: more than one medium: 0003.jpg, 0003.png"
    assert reasons["0004"] == "no caption"
    assert reasons["a b"].startswith("a b.png: rename it")


def test_a_duplicate_item_is_left_out_until_the_other_one_goes(folder: Path, tmp_path: Path):
    def copy(stem: str, text: str) -> None:
        shutil.copy(folder / "images/0001.png", folder / "images" / f"{stem}.png")
        caption(folder, stem, text)

    copy("0010", "picture 0")  # the same as 0001
    copy("0011", "another")
    kept = Dataset(folder, tmp_path / "kept")
    assert kept.make() == counts(items=7, units_read=7)

    dataset = Dataset(folder, tmp_path, duplicates="drop", max_left_out=0.0)
    assert dataset.make() == counts(items=6, left_out=1, units_read=7)
    assert dataset.left_out()[["name", "reason"]].to_numpy().tolist() == [
        ["0010", "the same medium and caption as mine/0001"]
    ]
    # What is there stays, though 0000a is listed before it; new files alone cause no other reads.
    copy("0000a", "picture 0")
    assert dataset.make() == counts(left_out=2, units_read=1)
    os.utime(folder / "images/0001.png")
    assert dataset.make() == counts(left_out=2, units_read=3)
    assert dataset.make() == counts(left_out=2)

    caption(folder, "0001", "edited")
    assert dataset.make() == counts(items=2, removed=1, left_out=1, units_read=3)
    assert dataset.left_out()["reason"].tolist() == ["the same medium and caption as mine/0000a"]
    items = dataset.all.items.set_index("name")
    assert items.loc["0000a", "caption"] == "picture 0"
    assert not items.loc["0000a", "new_medium"]
    for end in ("images/0000a.png", "metas/0000a.txt"):
        (folder / end).unlink()
    assert dataset.make() == counts(items=1, removed=1, units_read=1)
    assert sorted(dataset.all.items["name"]) == ["0000", "0001", "0002", "0003", "0004", "0010", "0011"]


def test_rows_of_arrow_files_are_items_and_a_damaged_file_is_left_out_whole(tmp_path: Path):
    for number in (0, 1):
        image(tmp_path / f"{number}.png", number)
    first, second = ((tmp_path / f"{number}.png").read_bytes() for number in (0, 1))
    columns = {
        "image": hf_folder.media([first, second, b"no picture", first, None]),
        "text": pa.array(["a", "b", "c", "a", "d"]),
    }
    folder = hf_folder.save(tmp_path / "rows", columns, {"image": {"_type": "Image"}}, files=2)
    dataset = Dataset(folder, tmp_path, duplicates="drop", max_left_out=1.0)
    dataset.sources = {"rows": hf.Options(local_dir=str(folder))}
    assert dataset.make() == counts(items=2, left_out=3, units_read=2)
    assert dataset.all.items["medium"].tolist() == [sha256(first), sha256(second)]
    table = dataset.left_out()
    assert table["name"].tolist() == [f"data-00001-of-00002-{number:06d}" for number in range(3)]
    assert table["reason"][0].startswith("cannot be read")
    assert table["reason"][1] == "the same medium and caption as rows/data-00000-of-00002-000000"
    assert table["reason"][2] == "no bytes in column image; a path alone is not read"

    file = folder / "data-00000-of-00002.arrow"
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    assert dataset.make() == counts(items=1, removed=2, left_out=3, units_read=2)
    assert (
        dataset.left_out().set_index("unit").loc["rows/data-00000-of-00002.arrow", "reason"].startswith("it ends early")
    )
    # What is there stays: now the row of the other file is.
    file.write_bytes(whole)
    assert dataset.make() == counts(items=1, left_out=3, units_read=1)
    assert sorted(dataset.all.items["medium"]) == sorted([sha256(first), sha256(second)])


def test_videos_have_their_frames_and_rate(tmp_path: Path):
    folder = tmp_path / "source"
    for stem, frames in (("long", 9), ("short", 2)):
        video(folder / "videos" / f"{stem}.mp4", 0, frames)
        caption(folder, stem, stem)
    (folder / "videos/cut.mp4").write_bytes((folder / "videos/long.mp4").read_bytes()[:-400])
    caption(folder, "cut", "cut")
    dataset = Dataset(folder, tmp_path, max_left_out=1.0, min_frames=5)
    dataset.make()
    (item,) = dataset.all.items.to_dict("records")
    assert (item["kind"], item["height"], item["width"], item["frames"], item["fps"]) == ("video", 32, 48, 9, 12.0)
    left_out = dataset.left_out().set_index("name")["reason"]
    assert left_out["short"] == "2 frames, expected at least 5"
    assert "cannot be read" in left_out["cut"]


def test_long_videos_are_left_out_with_the_reason(tmp_path: Path):
    folder = tmp_path / "source"
    for stem, frames in (("a", 12), ("b", 13), ("c", 25)):
        video(folder / f"{stem}.mp4", 0, frames)
    image(folder / "d.png", 0)
    for settings, expected in (
        ({"max_seconds": 1.0}, {"b": "1.08 s, expected at most 1 s", "c": "2.08 s, expected at most 1 s"}),
        ({"max_frames": 13}, {"c": "25 frames, expected at most 13"}),
        (
            {"max_frames": 24, "max_seconds": 2.0, "min_frames": 2},
            {"c": "25 frames, expected at most 24; 2.08 s, expected at most 2 s", "d": "1 frames, expected at least 2"},
        ),
    ):
        name = "-".join(settings)
        dataset = Dataset(folder, tmp_path / name, max_left_out=1.0, captioned=False, **settings)
        dataset.make()
        table = dataset.left_out()
        assert dict(zip(table["name"], table["reason"], strict=True)) == expected
        assert {*dataset.all.items["name"]} == {*"abcd"} - {*expected}


def test_a_video_of_an_unknown_rate_may_be_too_long(tmp_path: Path):
    folder = tmp_path / "source"
    # FFV1 says nothing of a rate, and the packets that are copied have no durations.
    (tmp_path / "whole.mkv").write_bytes(media.encode(np.zeros((2, 32, 48, 3), np.uint8))[1])
    folder.mkdir()
    with av.open(str(tmp_path / "whole.mkv")) as whole, av.open(str(folder / "a.mkv"), "w") as one:
        stream = one.add_stream_from_template(whole.streams.video[0])
        packet = next(whole.demux(video=0))
        packet.stream, packet.duration, packet.pts, packet.dts = stream, 0, 0, 0
        one.mux(packet)
    dataset = Dataset(folder, tmp_path, max_left_out=1.0, captioned=False, max_seconds=9)
    dataset.make()
    assert dataset.left_out()["reason"].tolist() == [
        "its frames per second are unknown, so whether it is at most 9 s long is too"
    ]


def test_pictures_are_as_large_as_they_are_shown(folder: Path, tmp_path: Path):
    exif = Image.Exif()
    exif[0x0112] = 6
    image(folder / "images/turned.jpg", 9, (10, 40), exif=exif)
    caption(folder, "turned", "turned")
    dataset = Dataset(folder, tmp_path)
    dataset.make()
    row = dataset.all.items.set_index("name").loc["turned"]
    assert (row["height"], row["width"]) == (40, 10)


def test_metadata_next_to_a_caption_is_kept(tmp_path: Path):
    folder = tmp_path / "source"
    image(folder / "0000.png", 0)
    (folder / "0000.json").write_text(json.dumps({"prompt": "a cat", "objects": ["cat"]}), encoding="utf-8")
    dataset = Dataset(folder, tmp_path)
    dataset.make()
    (item,) = dataset.all.items.to_dict("records")
    assert (item["caption"], json.loads(item["metadata"])) == ("a cat", {"objects": ["cat"]})


def test_files_that_change_while_a_part_is_made_are_refused(folder: Path, tmp_path: Path):
    request = Dataset(folder, tmp_path).request()
    caption(folder, "0000", "changed")
    with pytest.raises(DatasetError, match="have changed since this index was planned"):
        make(request, tmp_path)


def test_a_killed_part_goes_on_with_its_finished_shards(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dataset, probed, probe = Dataset(folder, tmp_path, units_per_shard=2), [], index.probe

    def failing(file: Any, kind: str) -> Any:
        if len(probed) == 4:
            raise MemoryError
        probed.append(kind)
        return probe(file, kind)

    monkeypatch.setattr(index, "probe", failing)
    with pytest.raises(MemoryError):
        dataset.make()
    probed.clear()
    dataset.make()
    assert len(probed) == 1
    assert len(dataset.all.items) == 5


def test_a_store_that_fails_while_a_file_is_read_leaves_nothing_out(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError("connection reset")

    monkeypatch.setattr(store, "stream", lambda url: Failing())
    with pytest.raises(OSError, match="connection reset"):
        Dataset(folder, tmp_path, max_left_out=1.0).make()
