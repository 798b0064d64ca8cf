"""A dataset that is brought up to date with its files: by several processes, under other settings, by hand."""

import json
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from cosmos_rl_core.datasets import local
from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.recipes.dataset import DatasetConfig
from cosmos_rl_core.storage import store
from flows.cli import app as cli
from flows.devices.devices import VISIBLE
from flows.operations.preprocess import outcome_of, preprocess, unchanged
from stages.artifacts import snapshots
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.formats.parts import Parts
from tests.caption_server import serving
from tests.stages.conftest import make


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """Three captioned images."""
    clips = tmp_path / "clips"
    for number in range(3):
        add(clips, number)
    return clips


def add(clips: Path, number: int) -> None:
    clips.mkdir(exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(clips / f"{number:04d}.png")
    (clips / f"{number:04d}.json").write_text(json.dumps({"prompt": f"picture {number}"}), encoding="utf-8")


def config_of(clips: Path, **settings: Any) -> DatasetConfig:
    values = {"name": "clips", "sources": {"mine": {"name": "local", "local_dir": str(clips)}}} | settings
    return DatasetConfig.model_validate(values)


def prepare(
    config: DatasetConfig, tmp_path: Path, made: list[str] | None = None, url: str = "", **options: bool
) -> str:
    """Prepare in this process; return the line for people."""

    def launch(name: str, request: Request) -> list[Manifest]:
        if made is not None:
            made.append(name)
        return [make(request, tmp_path / secrets.token_hex(4))]

    return outcome_of(*preprocess(config, url or str(tmp_path / "store"), launch, **options))


def names_of(tmp_path: Path, number: int | None = None) -> list[str]:
    """Names of the items of a snapshot, or of the newest."""
    url = str(tmp_path / "store")
    head = snapshots.newest(url, "clips") if number is None else snapshots.Snapshot.read(url, "clips", number)
    assert head is not None
    return sorted(Parts([Artifact(part) for part in head.parts]).items["name"])


def captions_of(tmp_path: Path, number: int) -> tuple[str, ...]:
    """Captions of a snapshot, by the names of the items."""
    head = snapshots.Snapshot.read(str(tmp_path / "store"), "clips", number)
    assert head is not None
    parts = Parts([Artifact(part) for part in head.parts], [Artifact(part) for part in head.captions])
    return tuple(parts.items.sort_values("name")["caption"])


def test_each_snapshot_adds_a_part_and_leaves_the_earlier_ones_whole(clips: Path, tmp_path: Path):
    config, made = config_of(clips), list[str]()
    assert prepare(config, tmp_path, made) == "clips: snapshot 1: 3 new, 0 removed, 0 left out"
    assert prepare(config, tmp_path, made) == "clips: snapshot 1, nothing new"
    assert len(made) == 1
    add(clips, 3)
    (clips / "0000.png").unlink()
    (clips / "0000.json").unlink()
    assert prepare(config, tmp_path, made) == "clips: snapshot 2: 1 new, 1 removed, 0 left out"
    assert names_of(tmp_path, 1) == ["0000", "0001", "0002"]
    assert names_of(tmp_path, 2) == names_of(tmp_path) == ["0001", "0002", "0003"]
    head = snapshots.newest(str(tmp_path / "store"), "clips")
    first = snapshots.Snapshot.read(str(tmp_path / "store"), "clips", 1)
    assert head is not None
    assert first is not None
    assert head.previous == first.digest
    assert head.parts[:1] == first.parts


def test_items_without_a_caption_get_one_and_another_captioner_indexes_nothing(clips: Path, tmp_path: Path):
    (clips / "0001.json").unlink()
    made = list[str]()
    first, second = ({"caption": {"by": "text", "text": text}} for text in ("a thing", "another thing"))
    assert prepare(config_of(clips, **first), tmp_path, made) == (
        "clips: snapshot 1: 3 new, 0 removed, 0 left out, 1 captioned"
    )
    assert prepare(config_of(clips, **first), tmp_path, made) == "clips: snapshot 1, nothing new"
    assert unchanged(config_of(clips, **first), str(tmp_path / "store")) is not None
    add(clips, 3)
    assert prepare(config_of(clips, **first), tmp_path, made) == (
        "clips: snapshot 2: 1 new, 0 removed, 0 left out, 0 captioned"
    )
    assert made == ["index", "caption"] * 2
    (clips / "0003.json").unlink()
    assert prepare(config_of(clips, **second), tmp_path, made) == (
        "clips: snapshot 3: 1 new, 1 removed, 0 left out, 2 captioned"
    )
    assert made[4:] == ["index", *["caption"] * 3]
    assert prepare(config_of(clips, **first), tmp_path, made) == (
        "clips: snapshot 4: 0 new, 0 removed, 0 left out, 2 captioned"
    )
    assert made[8:] == ["caption"] * 3
    found = captions_of(tmp_path, 3), captions_of(tmp_path, 4)
    expected = ("picture 0", "another thing", "picture 2", "another thing")
    assert found == (expected, tuple(text.replace("another", "a") for text in expected))


def test_captions_are_kept_under_other_settings_without_asking_the_captioner(clips: Path, tmp_path: Path):
    (clips / "0001.json").unlink()
    with serving() as server:
        caption = {"by": "endpoint", "url": server.url, "model": "vlm", "instruction": "?"}
        prepare(config_of(clips, caption=caption), tmp_path)
        assert prepare(config_of(clips, caption=caption | {"concurrency": 2}), tmp_path).endswith("nothing new")
        said = prepare(config_of(clips, caption=caption, min_size=(2, 2)), tmp_path)
        assert said == "clips: snapshot 2: 0 new, 0 removed, 0 left out, 1 captioned"
        assert len(server.asked) == 1
    assert captions_of(tmp_path, 2) == ("picture 0", "1 of 8 x 8", "picture 2")


def test_parts_are_merged_into_one_and_the_earlier_snapshots_stay_whole(clips: Path, tmp_path: Path):
    (clips / "0001.json").unlink()
    config, made = config_of(clips, caption={"by": "text", "text": "a thing"}), list[str]()
    prepare(config, tmp_path)
    assert prepare(config, tmp_path, merge=True) == "clips: snapshot 1, nothing new"
    add(clips, 3)
    (clips / "0000.png").unlink()
    (clips / "0000.json").unlink()
    prepare(config, tmp_path)
    assert prepare(config, tmp_path, made, merge=True) == (
        "clips: snapshot 3: 0 new, 0 removed, 0 left out, 1 captioned"
    )
    assert made == ["index", "caption"]
    assert captions_of(tmp_path, 3) == captions_of(tmp_path, 2) == ("a thing", "picture 2", "picture 3")
    assert captions_of(tmp_path, 1) == ("picture 0", "a thing", "picture 2")
    head = snapshots.newest(str(tmp_path / "store"), "clips")
    assert head is not None
    assert (len(head.parts), len(head.captions)) == (1, 1)
    assert prepare(config, tmp_path, merge=True) == prepare(config, tmp_path) == "clips: snapshot 3, nothing new"


def test_a_merge_counts_what_changed_since_the_snapshot_before(clips: Path, tmp_path: Path):
    prepare(config_of(clips), tmp_path)
    add(clips, 3)
    prepare(config_of(clips), tmp_path)
    add(clips, 4)
    (clips / "0000.json").write_text('{"prompt": "edited"}', encoding="utf-8")
    assert prepare(config_of(clips), tmp_path, merge=True) == "clips: snapshot 3: 2 new, 1 removed, 0 left out"


def test_a_missing_token_is_named_before_anything_starts(clips: Path, tmp_path: Path):
    service = {"by": "endpoint", "url": "http://host/v1", "model": "vlm", "instruction": "?"}
    config = config_of(clips, caption=service | {"token_variable": "CAPTION_NO_TOKEN"})
    made = list[str]()
    with pytest.raises(ConfigError, match="CAPTION_NO_TOKEN is not set"):
        prepare(config, tmp_path, made)
    assert made == []
    with pytest.raises(ValueError, match="captioned = false keeps items without a caption"):
        config_of(clips, captioned=False, caption=service)


def test_one_damaged_file_among_many_is_left_out_until_it_is_mended(clips: Path, tmp_path: Path):
    for number in range(3, 20):
        add(clips, number)
    config = config_of(clips, max_left_out=0.05)
    prepare(config, tmp_path)
    whole = (clips / "0007.png").read_bytes()
    (clips / "0007.png").write_bytes(whole[:50])
    said = prepare(config, tmp_path)
    assert said.startswith("clips: snapshot 2: 0 new, 1 removed, 1 left out\n  left out: ")
    add(clips, 20)
    assert prepare(config, tmp_path) == said.replace("2: 0 new, 1 removed", "3: 1 new, 0 removed")
    (clips / "0007.png").write_bytes(whole)
    assert prepare(config, tmp_path) == "clips: snapshot 4: 1 new, 0 removed, 0 left out"


def test_a_verification_finds_edits_that_stamps_do_not_show(clips: Path, tmp_path: Path):
    config, file = config_of(clips, max_left_out=0.5), clips / "0001.json"
    prepare(config, tmp_path)
    stat, whole = file.stat(), file.read_bytes()
    file.write_bytes(whole.replace(b"picture 1", b"picture 9"))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert prepare(config, tmp_path) == "clips: snapshot 1, nothing new"
    assert prepare(config, tmp_path, verify=True) == (
        "clips: snapshot 2: 1 new, 1 removed, 0 left out\n1 item changed in files that look unchanged: mine/0001"
    )
    assert prepare(config, tmp_path) == "clips: snapshot 2, nothing new"
    picture = clips / "0002.png"
    stat, whole = picture.stat(), picture.read_bytes()
    picture.write_bytes(bytes(len(whole)))
    os.utime(picture, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    add(clips, 3)
    made = list[str]()
    assert prepare(config, tmp_path, made, verify=True) == (
        "clips: snapshot 3: 1 new, 1 removed, 1 left out\n"
        "  left out: mine/0002: cannot be read: cannot identify image file; expected one of JPEG, PNG, WEBP, GIF, BMP\n"
        "1 item changed in files that look unchanged: mine/0002"
    )
    assert names_of(tmp_path) == ["0000", "0001", "0003"]
    assert prepare(config, tmp_path, made, verify=True).startswith("clips: snapshot 4: 0 new, 0 removed, 1 left out")
    assert made == ["index", "index"]
    assert names_of(tmp_path, 1) == ["0000", "0001", "0002"]


def test_a_disk_that_is_not_mounted_removes_no_items(clips: Path, tmp_path: Path):
    prepare(config_of(clips), tmp_path)
    clips.rename(tmp_path / "away")
    clips.mkdir()
    with pytest.raises(ConfigError, match="no folder at"):
        prepare(config_of(clips), tmp_path)


def test_a_folder_whose_media_lie_further_down_is_no_empty_dataset(clips: Path, tmp_path: Path):
    (clips / "notes.md").write_text("notes", encoding="utf-8")
    (tmp_path / "all").mkdir()
    clips.rename(tmp_path / "all" / "pictures")
    with pytest.raises(ConfigError, match=r"no image or video in .*all; .* there are media in pictures: name one"):
        prepare(config_of(tmp_path / "all"), tmp_path)
    assert snapshots.newest(str(tmp_path / "store"), "clips") is None


def test_files_and_store_may_be_in_s3(clips: Path, s3_url: str, tmp_path: Path):
    root = f"{s3_url}/{secrets.token_hex(4)}"
    for file in clips.iterdir():
        store.write(f"{root}/clips/{file.name}", file.read_bytes())
    config, made = config_of(clips), list[str]()
    config = config.model_copy(update={"sources": {"mine": local.Options(local_dir=f"{root}/clips")}})
    assert prepare(config, tmp_path, made, root) == "clips: snapshot 1: 3 new, 0 removed, 0 left out"
    assert prepare(config, tmp_path, made, root) == "clips: snapshot 1, nothing new"
    store.write(f"{root}/clips/0001.json", b'{"prompt": "another"}')
    store.remove(f"{root}/clips/0002.png")
    store.remove(f"{root}/clips/0002.json")
    assert prepare(config, tmp_path, made, root) == "clips: snapshot 2: 1 new, 2 removed, 0 left out"
    assert len(made) == 2


def test_two_preparations_at_once_write_one_snapshot(clips: Path, tmp_path: Path):
    with ThreadPoolExecutor() as pool:
        said = [*pool.map(lambda _: prepare(config_of(clips), tmp_path), range(2))]
    assert "clips: snapshot 1: 3 new, 0 removed, 0 left out" in said
    head = snapshots.newest(str(tmp_path / "store"), "clips")
    assert head is not None
    assert (head.number, len(head.parts)) == (1, 1)


def test_under_other_settings_all_files_are_read_again(clips: Path, tmp_path: Path):
    prepare(config_of(clips), tmp_path)
    assert unchanged(config_of(clips, max_left_out=1.0), str(tmp_path / "store")) is not None
    other = config_of(clips, min_size=(9, 9), max_left_out=1.0)
    left_out = (f"  left out: mine/000{number}: 8 x 8 pixels, expected at least 9 x 9" for number in range(3))
    said = ["clips: snapshot 2: 0 new, 3 removed, 3 left out", *left_out]
    assert prepare(other, tmp_path).splitlines() == said
    assert names_of(tmp_path) == []
    assert names_of(tmp_path, 1) == ["0000", "0001", "0002"]


def test_the_newest_of_many_snapshots_is_found_by_probing(clips: Path, tmp_path: Path):
    url = str(tmp_path / "store")
    prepare(config_of(clips), tmp_path)
    head = snapshots.newest(url, "clips")
    assert head is not None
    for number in range(2, 12):
        head = head.model_copy(update={"number": number, "previous": head.digest})
        assert snapshots.put(url, head)
        found = snapshots.newest(url, "clips")
        assert found is not None
        assert found.number == number
    assert not snapshots.put(url, head.model_copy(update={"stamps": "another process's"}))


def test_a_changed_snapshot_is_damage(clips: Path, tmp_path: Path):
    prepare(config_of(clips), tmp_path)
    file = Path(snapshots.url_of(str(tmp_path / "store"), "clips", 1))
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b'"number":1', b'"number":2'))
    with pytest.raises(ArtifactError, match="its digest does not match"):
        snapshots.newest(str(tmp_path / "store"), "clips")
    file.write_bytes(whole)
    file.rename(file.with_name("2.json"))
    with pytest.raises(ArtifactError, match="was written as snapshot 1"):
        snapshots.Snapshot.read(str(tmp_path / "store"), "clips", 2)


def test_the_command_starts_nothing_if_nothing_is_new(clips: Path, tmp_path: Path):
    prepare(config_of(clips), tmp_path)
    file = tmp_path / "clips.toml"
    file.write_text(f'name = "clips"\n[sources.mine]\nname = "local"\nlocal_dir = "{clips}"', encoding="utf-8")
    ended = CliRunner().invoke(cli.app, ["preprocess", str(file), "--store", str(tmp_path / "store")])
    assert (ended.exit_code, ended.output) == (0, "clips: snapshot 1, nothing new\n")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ('name = "clips"', "sources: Field required"),
        ('name = "clips"\n[sources.a]\nname = "locl"', "did you mean 'local'"),
        ('name = "a/b"\n[sources.a]\nname = "local"\nlocal_dir = "x"', "name: String should match pattern"),
        (
            'name = "clips"\nmin_frames = 9\nmax_frames = 8\n[sources.a]\nname = "local"\nlocal_dir = "x"',
            "max_frames = 8 is less than min_frames = 9",
        ),
        ('name = "clips"\nmax_seconds = 0\n[sources.a]\nname = "local"\nlocal_dir = "x"', "max_seconds: "),
        ('name = "clips"\nmin_frame = 2\n[sources.a]\nname = "local"\nlocal_dir = "x"', "min_frames"),
    ],
)
def test_mistakes_of_a_file_are_named(lines: str, expected: str, tmp_path: Path):
    file = tmp_path / "clips.toml"
    file.write_text(lines, encoding="utf-8")
    ended = CliRunner().invoke(cli.app, ["preprocess", str(file)])
    assert ended.exit_code == 64
    assert expected in ended.output


def test_mistakes_of_files_and_commands_and_stages_that_fit_no_device_are_named_at_once(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(VISIBLE, ",".join(f"GPU-{number}" for number in range(8)))
    (tmp_path / "bad.toml").write_text("[train]\nnum_iterations = 0\n", encoding="utf-8")
    file = tmp_path / "clips.toml"
    source = f'[sources.mine]\nname = "local"\nlocal_dir = "{clips}"\n'
    launch = "[launch]\ngpus = 4\nprocesses = 8\n"
    file.write_text(f'name = "clips"\nrecipes = ["bad.toml"]\nmin_frames = {2**64}\n{source}{launch}', encoding="utf-8")
    words = ("--set", f"max_frames={2**64}", "--set", "captioned", "--store", str(tmp_path / "store"))
    ended = CliRunner().invoke(cli.app, ["preprocess", str(file), *words])
    assert ended.exit_code == 64
    for said in (
        f"{file}: min_frames is a whole number of more than 64 bits",
        "max_frames is a whole number of more than 64 bits",
        "cannot read override 'captioned'",
        "train.num_iterations: Input should be greater than or equal to 1",
        "embed, encode: 8 GPUs each, one for each process; launch.gpus = 4",
    ):
        assert said in ended.output


def test_a_dataset_without_files_and_a_folder_that_is_not_there_are_named(tmp_path: Path):
    config = DatasetConfig.model_validate({"name": "clips", "sources": {"a": {"name": "mock"}}})
    with pytest.raises(ConfigError, match="'mock' is no source of files; sources: hf, local, rendered_text"):
        prepare(config, tmp_path)
    with pytest.raises(ConfigError, match="no folder at"):
        prepare(config_of(tmp_path / "away"), tmp_path)
