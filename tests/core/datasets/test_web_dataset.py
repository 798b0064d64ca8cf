"""Shards as a source: what counts as a sample, where shards may be, what is left out, and what is refused."""

import io
import json
import secrets
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError
from webdataset.compat import WebDataset
from webdataset.writer import ShardWriter

from cosmos_rl_core.datasets._base import ItemError
from cosmos_rl_core.datasets.web import SHARDS_KEPT, Options, Source, prompts
from cosmos_rl_core.errors import ConfigError, DatasetError, UnavailableError
from cosmos_rl_core.storage import http, store
from tests.file_server import FileServer, serving
from tests.tar_files import shard


def picture(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def samples(*numbers: int) -> bytes:
    """A shard of captioned pictures."""
    pairs = ({f"{n:04d}.png": picture(n), f"{n:04d}.txt": f"picture {n}\n".encode()} for n in numbers)
    return shard({name: data for pair in pairs for name, data in pair.items()})


def source_of(*urls: str | Path, **options: Any) -> Source:
    source = Source(Options(urls=tuple(map(str, urls)), **options))
    source.stamps()
    return source


def read(source: Source) -> dict[str, tuple[str | None, bytes | str]]:
    """Caption and medium of each item, or why it has none."""
    found: dict[str, tuple[str | None, bytes | str]] = {}
    for unit in source.stamps():
        try:
            items = source.items(unit)
        except ConfigError as error:
            found[unit] = (None, str(error))
            continue
        for item in items:
            try:
                with source.open(item.name) as file:
                    found[item.name] = (item.caption, file.read())
            except ConfigError as error:
                found[item.name] = (item.caption, str(error))
    return found


def expected(unit: str, *numbers: int) -> dict[str, tuple[str, bytes]]:
    return {f"{unit}/{n:04d}": (f"picture {n}", picture(n)) for n in numbers}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards: of samples 0 and 1, and of sample 2."""
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "000.tar").write_bytes(samples(0, 1))
    (folder / "001.tar").write_bytes(samples(2))
    return folder


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setattr(http, "FIRST_DELAY_S", 0.001)
    with serving() as server:
        yield server


ALL = expected("000.tar", 0, 1) | expected("001.tar", 2)


def test_a_folder_a_range_and_a_list_are_the_same_shards(folder: Path):
    for urls in ([folder], [f"{folder}/{{000..001}}.tar"], [folder / "000.tar", folder / "001.tar"]):
        assert read(source_of(*urls)) == ALL
    assert read(source_of(f"{folder}/{{000,001}}.tar")) == ALL
    assert Options.model_validate({"urls": str(folder)}) == Options(urls=(str(folder),))


def test_samples_equal_webdatasets(folder: Path):
    with ShardWriter(str(folder / "%03d.tar"), maxcount=2, verbose=0) as writer:
        for number in range(3):
            writer.write({"__key__": f"{number:04d}", "png": picture(number), "txt": f"picture {number}"})
    assert read(source_of(folder)) == ALL
    theirs = WebDataset([str(folder / "000.tar"), str(folder / "001.tar")], shardshuffle=False)
    assert [(one["__key__"], one["png"]) for one in theirs] == [
        (name.rpartition("/")[2], medium) for name, (_, medium) in ALL.items()
    ]


def test_shards_of_gnu_tar_are_read(folder: Path, tmp_path: Path):
    for number in (0, 1):
        (tmp_path / f"{number:04d}.png").write_bytes(picture(number))
        (tmp_path / f"{number:04d}.txt").write_text(f"picture {number}", encoding="utf-8")
    (tmp_path / "._0000.png").write_bytes(b"what macOS adds")
    command = ["tar", "-cf", folder / "000.tar", "--exclude=shards", "-C", tmp_path, "."]
    subprocess.run(command, check=True)
    assert read(source_of(folder)) == ALL


def test_shards_may_be_in_s3(folder: Path, s3_url: str):
    root = f"{s3_url}/{secrets.token_hex(4)}"
    for file in folder.iterdir():
        store.write(f"{root}/{file.name}", file.read_bytes())
    assert read(source_of(root)) == read(source_of(f"{root}/{{000..001}}.tar")) == ALL
    assert source_of(root).stamps() == source_of(f"{root}/{{000..001}}.tar").stamps()
    before = source_of(root).stamps()
    store.write(f"{root}/001.tar", samples(3))
    after = source_of(root).stamps()
    assert [unit for unit in before if before[unit] != after[unit]] == ["001.tar"]
    with pytest.raises(ConfigError, match=rf"no shard at:\n    {root}/002.tar"):
        source_of(f"{root}/{{000..002}}.tar")


def test_shards_may_be_behind_http(folder: Path, server: FileServer):
    server.files = {f"/{file.name}": file.read_bytes() for file in folder.iterdir()}
    url = f"{server.url}/{{000..001}}.tar?signature=secret"
    server.cuts = [3000]
    assert read(source_of(url)) == ALL
    gets = [path for method, path, wanted in server.asked if method == "GET" and not wanted]
    assert gets == ["/000.tar", "/001.tar"], "each shard is transferred once"
    with pytest.raises(ConfigError, match=r"no shard at:\n    http://127.*/002\.tar$"):
        source_of(f"{server.url}/002.tar?signature=secret")


def test_threads_share_a_shard_and_each_learns_why_one_is_unreadable(folder: Path, server: FileServer):
    server.files = {"/000.tar": samples(*range(20)), "/001.tar": b"no tar"}
    source = source_of(f"{server.url}/{{000..001}}.tar")

    def read_one(number: int) -> bytes:
        with source.open(f"000.tar/{number:04d}") as file:
            return file.read()

    def fault(_: int) -> str:
        with pytest.raises(ItemError) as raised:
            source.items("001.tar")
        return str(raised.value)

    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(read_one, range(20))] == [picture(number) for number in range(20)]
        assert all("cut short" in reason for reason in pool.map(fault, range(8)))
    assert [path for method, path, _ in server.asked if method == "GET"].count("/000.tar") == 1


def test_shards_beyond_the_number_that_stays_open_are_opened_again(folder: Path):
    for number in range(SHARDS_KEPT + 2):
        (folder / f"{number:03d}.tar").write_bytes(samples(number))
    source = source_of(folder)
    names = [f"{number:03d}.tar/{number:04d}" for number in range(SHARDS_KEPT + 2)]
    files = [source.open(name) for name in [*names, *names]]
    assert [file.read() for file in files] == [picture(number) for number in range(SHARDS_KEPT + 2)] * 2
    for file in files:
        file.close()


def test_a_server_that_fails_leaves_nothing_out(folder: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch):
    server.files = {f"/{file.name}": file.read_bytes() for file in folder.iterdir()}
    source = source_of(f"{server.url}/000.tar")
    monkeypatch.setattr(http, "RETRY_FOR_S", 0.0)
    server.statuses = [500]
    with pytest.raises(UnavailableError):
        source.items("000.tar")
    assert len(source.items("000.tar")) == 2


def test_an_item_is_found_in_any_order_and_stays_open(folder: Path):
    source = source_of(folder)
    second, first = source.open("001.tar/0002"), source.open("000.tar/0001")
    assert first.read() == picture(1)
    assert second.seek(-4, io.SEEK_END) == len(picture(2)) - 4
    assert second.read() == b"\xaeB`\x82"
    assert second.tell() == len(picture(2))
    second.seek(1)
    assert second.read(3) == b"PNG"


def test_a_shard_that_changes_after_it_was_listed_is_refused(folder: Path):
    source = source_of(folder)
    (folder / "000.tar").write_bytes(samples(0, 1, 3))
    with pytest.raises(DatasetError, match=r"000\.tar has changed since it was listed"):
        source.items("000.tar")


def test_an_item_that_has_gone_is_not_found(folder: Path):
    source = source_of(folder)
    for name in ("002.tar/0000", "000.tar/0009", "0000"):
        with pytest.raises(KeyError):
            source.open(name)
    assert [item.name for item in source.items("000.tar")] == ["000.tar/0000", "000.tar/0001"]


def test_a_caption_comes_from_text_or_json_with_the_other_values(folder: Path):
    about = json.dumps({"prompt": "a cat", "objects": ["cat"]}).encode()
    (folder / "000.tar").write_bytes(shard({"a/0.cls.PNG": picture(1), "a/0.PNG": picture(0), "a/0.json": about}))
    (folder / "001.tar").write_bytes(
        shard({"0.jpg": picture(0), "0.long.txt": b"long", "0.txt": b"short", "0.mp4": b"a video", "readme": b""})
    )
    (item,) = source_of(folder / "000.tar").items("000.tar")
    assert item == ("000.tar/a/0", "image", "a cat", {"objects": ["cat"]})
    assert read(source_of(folder / "001.tar", medium="mp4", caption="long.txt")) == {"001.tar/0": ("long", b"a video")}
    assert source_of(folder / "001.tar", medium="mp4").items("001.tar")[0].kind == "video"
    (chosen,) = source_of(folder / "000.tar", caption="json", caption_key="title").items("000.tar")
    assert chosen.caption is None


def test_one_damaged_sample_is_left_out_alone(folder: Path):
    files = {
        "good.png": picture(0), "good.txt": b"good",
        "bare.png": picture(1),
        "both.png": picture(0), "both.jpg": picture(0), "both.txt": b"both",
        "lone.txt": b"lone",
        "empty.png": picture(0), "empty.txt": b" ",
        "bytes.png": picture(0), "bytes.txt": b"\xff",
        "deep.png": picture(0), "deep.json": b"[" * 100_000,
        "nan.png": picture(0), "nan.json": b'{"prompt": "a", "x": NaN}',
        "long.png": picture(0), "long.txt": b"a" * (2**20 + 1),
    }  # fmt: skip
    (folder / "000.tar").write_bytes(shard(files))
    found = {name.rpartition("/")[2]: value for name, value in read(source_of(folder / "000.tar")).items()}
    assert found["good"] == ("good", picture(0))
    assert found["bare"] == (None, picture(1))
    reasons = {name: medium for name, (_, medium) in found.items() if isinstance(medium, str)}
    assert reasons["both"] == "both: more than one medium: png, jpg; name one as `medium`"
    assert reasons["lone"] == "lone: no image or video, only txt"
    assert reasons["empty"] == "empty.txt: the caption is empty"
    assert reasons["bytes"].startswith("bytes.txt: cannot be read: 'utf-8'")
    assert reasons["deep"].startswith("deep.json: cannot be read: maximum recursion depth")
    assert reasons["nan"].startswith("nan.json: cannot be read: Out of range float")
    assert reasons["long"] == "long.txt: 1048577 bytes, expected at most 1048576 of a caption"
    assert reasons.keys() == {"both", "lone", "empty", "bytes", "deep", "nan", "long"}


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda whole: whole[:3000], "cut short"),
        (lambda whole: shard({"../0.png": b"", "0.txt": b"a"}), "'../0.png' leads out of the folder"),
        (lambda whole: shard({"0.png": b"", "0.PNG": b""}), "'0.PNG' comes twice"),
        (lambda whole: shard({"readme": b""}), "no sample in it"),
        (lambda whole: b"\x1f\x8b" + whole, "it is compressed"),
        (lambda whole: b"", "cut short"),
    ],
)
def test_a_hostile_or_damaged_shard_is_left_out_whole(folder: Path, damage: Callable[[bytes], bytes], reason: str):
    (folder / "000.tar").write_bytes(damage(samples(0, 1)))
    found = read(source_of(folder))
    assert {name: found[name] for name in found if name != "000.tar"} == expected("001.tar", 2)
    assert reason in str(found["000.tar"][1])


def windows(*captions: str) -> bytes:
    each = [
        {"start_frame": 93 * n, "end_frame": 93 * n + 93, "qwen2p5_7b_caption": text, "qwen2p5_7b_caption_short": "s"}
        for n, text in enumerate(captions)
    ]
    return json.dumps({"framerate": 24.0, "nb_frames": 200, "t2w_windows": each}).encode()


def test_an_index_of_upstreams_layout_joins_captions_and_media(tmp_path: Path):
    metas = shard({"a.json": windows("first", "second"), "b.json": windows("third"), "c.json": windows()})
    video = shard({"b.mp4": b"video b", "a.mp4": b"video a", "c.mp4": b"video c", "d.mp4": b"video d"})
    for name, data in (("metas", metas), ("video", video)):
        (tmp_path / "clips" / name / "part_0").mkdir(parents=True)
        (tmp_path / "clips" / name / "part_0" / "000.tar").write_bytes(data)
    index = {"root": "clips", "data_list": ["part_0/000.tar"], "total_key_count": 4, "chunk_size": 4}
    (tmp_path / "wdinfo.json").write_text(json.dumps(index), encoding="utf-8")
    source = source_of(tmp_path / "wdinfo.json")
    found = read(source)
    assert found == {
        "part_0/000.tar/a": ("first", b"video a"),
        "part_0/000.tar/b": ("third", b"video b"),
        "part_0/000.tar/c": (None, "c.json: no window; expected a list of objects as t2w_windows"),
        "part_0/000.tar/d": (None, b"video d"),
    }
    (first, *_) = source.items("part_0/000.tar")
    assert first.kind == "video"
    assert [window["qwen2p5_7b_caption"] for window in first.metadata["t2w_windows"]] == ["first", "second"]
    short = source_of(tmp_path / "wdinfo.json", caption_key="qwen2p5_7b_caption_short")
    assert short.items("part_0/000.tar")[0].caption == "s"
    (before,) = source.stamps().values()
    (tmp_path / "clips/metas/part_0/000.tar").write_bytes(shard({"a.json": windows("other")}))
    assert source.stamps() != {"part_0/000.tar": before}
    (tmp_path / "clips/video/part_0/000.tar").unlink()
    with pytest.raises(ConfigError, match=r"no shard at:\n    .*/clips/video/part_0/000\.tar"):
        source.stamps()


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (b"\x80\x04}.", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "expected an object with root and data_list"),
        (b"{}", "data_list is no list with names of tars in it"),
        (b'{"data_list": ["../0.tar", 7, "/0.tar", "a"]}', r"'\.\./0\.tar', which is no name(.|\n)*'7'(.|\n)*'/0.tar'"),
        (b'{"data_list": ["0.tar", "0.tar"]}', "a name twice"),
        (b'{"root": "pipe:rm -rf", "data_list": ["0.tar"]}', "pipe is not read"),
        (b'{"root": 7, "data_list": ["0.tar"]}', "root is no text"),
    ],
)
def test_mistakes_of_an_index_are_named(index: bytes, reason: str, tmp_path: Path):
    (tmp_path / "wdinfo.json").write_bytes(index)
    with pytest.raises(ConfigError, match=reason):
        source_of(tmp_path / "wdinfo.json")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("pipe:curl x", "pipe is not read; known: a path, s3://, http://, https://"),
        ("gs://bucket/0.tar", "gs is not read"),
        ("http://host/folder", "no folder can be listed over http"),
        ("https://me:secret@host/0.tar", "host/0.tar: a password in a URL would be written into the store"),
        ("https:///0.tar", "it names no server"),
        ("https://host:port/0.tar", "no URL: "),
        ("wdinfo.pkl", "is no place of shards"),
        ("", "is no place of shards"),
        ("{000..}.tar", "is no range; expected"),
        ("{9..0}.tar", "is no range of at most"),
        ("{0..999999999999}.tar", "is no range of at most 100000"),
        ("{000..999}{000..999}.tar", "names more than 100000 URLs"),
        ("{0..1.tar", "a brace without its other half"),
    ],
)
def test_urls_that_cannot_be_read_are_named_at_once(url: str, reason: str):
    with pytest.raises(ValidationError, match=reason):
        Options(urls=("fine.tar", url))
    with pytest.raises(ValidationError, match="ftp is not read"):
        Options(urls=("fine.tar", url, "ftp://also/0.tar"))


def test_a_disk_that_is_not_mounted_and_two_shards_of_one_name_are_mistakes(folder: Path, tmp_path: Path):
    for place in (tmp_path / "away", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match=f"no shard at {place}; expected a folder"):
            source_of(folder, place)
    with pytest.raises(ConfigError, match=r"0\.tar is the name of two shards: a/0\.tar and b/0\.tar"):
        source_of("{a,b}/0.tar")


def test_prompts_are_the_captions_and_every_mistake_is_listed(folder: Path):
    assert [prompt.text for prompt in prompts(Options(urls=(str(folder),)))] == [f"picture {n}" for n in range(3)]
    (folder / "000.tar").write_bytes(shard({"0.png": b"", "1.json": b"a", "2.txt": b" ", "2.png": b""}))
    (folder / "001.tar").write_bytes(b"no tar")
    with pytest.raises(ConfigError) as raised:
        prompts(Options(urls=(str(folder),)))
    assert len(str(raised.value).splitlines()) == 5
