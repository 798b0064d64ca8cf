"""References in parts of a dataset: what is kept of them, what makes a change, and what leaves an item out."""

import io
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from cosmos_rl_core.canonical import digest, sha256
from cosmos_rl_core.conformance.kinds import hf_folder
from cosmos_rl_core.datasets import hf, local, web
from cosmos_rl_core.datasets._base import prompt_id
from cosmos_rl_core.errors import DatasetError
from cosmos_rl_core.storage import store
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.pool import INDEX, PICTURES
from stages.formats.parts import COLUMNS, references_in
from stages.formats.tables import read_table
from tests.stages.test_index import Dataset, counts
from tests.tar_files import shard


def picture(seed: int, size: tuple[int, int] = (16, 24)) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def edit(folder: Path, number: int, *references: str, text: str = "a hat") -> None:
    about: dict[str, Any] = {"prompt": text} | ({"references": references} if references else {})
    (folder / f"{number}.png").write_bytes(picture(100 + number))
    (folder / f"{number}.json").write_text(json.dumps(about), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three edits, the first two of one picture, and a medium without references."""
    (folder := tmp_path / "edits").mkdir()
    (folder / "before").mkdir()
    for number in range(3):
        (folder / "before" / f"{number}.png").write_bytes(picture(number, (16, 24 + number)))
    edit(folder, 0, "before/0.png")
    edit(folder, 1, "before/0.png", "before/1.png")
    edit(folder, 2, "before/2.png", text="a coat")
    edit(folder, 3)
    return folder


def kept(tmp_path: Path) -> set[str]:
    """Names of the pictures in the store."""
    found = tmp_path / "store" / "dataset" / PICTURES
    names = {path.name for path in found.iterdir()} if found.exists() else set[str]()
    assert all(sha256((found / name).read_bytes()) == name for name in names)
    return names


DIGESTS = [sha256(picture(number, (16, 24 + number))) for number in range(3)]


def test_the_store_keeps_each_picture_once_and_prompt_ids_cover_pictures(folder: Path, tmp_path: Path):
    dataset = Dataset(folder, tmp_path)
    assert dataset.make() == counts(items=4, units_read=4)
    items = dataset.all.items.set_index("name")
    referred = {"0": DIGESTS[:1], "1": DIGESTS[:2], "2": DIGESTS[2:], "3": []}
    found = {name: references_in(value) for name, value in items["references"].items()}
    assert {name: [one.digest for one in some] for name, some in found.items()} == referred
    assert [(one.height, one.width) for one in found["1"]] == [(16, 24), (16, 25)]
    texts = {"0": "a hat", "1": "a hat", "2": "a coat", "3": "a hat"}
    assert items["prompt_id"].to_dict() == {name: prompt_id(texts[name], some) for name, some in referred.items()}
    assert kept(tmp_path) == {*DIGESTS}
    part = Artifact(dataset.parts[0])
    assert part.json(INDEX) == {
        one: [f"{PICTURES}/{one}", len(picture(n, (16, 24 + n))), one] for n, one in enumerate(DIGESTS)
    }


def test_a_part_without_references_has_the_columns_ids_and_files_of_earlier_versions(folder: Path, tmp_path: Path):
    for number in range(3):
        edit(folder, number)
    dataset = Dataset(folder, tmp_path)
    dataset.make()
    part = Artifact(dataset.parts[0])
    table = read_table(part, contracts.Index.ITEMS)
    assert [*table.columns] == [*COLUMNS]
    assert not part.names(INDEX)
    assert kept(tmp_path) == set()
    for row in table.to_dict("records"):
        unit, name = f"mine/{row['name']}", row["name"]
        assert row["item"] == digest([row["medium"], "a hat", "{}", unit, name])[:32]


def test_a_changed_reference_makes_another_item_and_only_its_unit_is_read(folder: Path, tmp_path: Path):
    dataset = Dataset(folder, tmp_path)
    dataset.make()
    assert dataset.make() == counts()
    (folder / "before" / "1.png").write_bytes(other := picture(9))
    assert dataset.make() == counts(items=1, removed=1, units_read=1)
    assert kept(tmp_path) == {*DIGESTS, sha256(other)}
    assert Artifact(dataset.parts[-1]).json(INDEX).keys() == {DIGESTS[0], sha256(other)}
    # The same bytes, written again.
    os.utime(folder / "before" / "0.png")
    assert dataset.make() == counts(units_read=2)
    edit(folder, 4, "before/2.png", text="a coat")
    assert dataset.make() == counts(items=1, units_read=1)
    new = dataset.all.items.query("part == 4").iloc[0]
    assert (new["name"], new["new_medium"], new["new_prompt"]) == ("4", True, False)


@pytest.mark.parametrize("extension", [".bmp", ".gif", ".tiff", ".avif", ""])
def test_a_changed_reference_is_found_with_any_file_extension(extension: str, tmp_path: Path):
    (folder := tmp_path / "edits" / "before").mkdir(parents=True)
    (reference := folder / f"0{extension}").write_bytes(picture(0))
    edit(folder.parent, 0, f"before/0{extension}")
    edit(folder.parent, 1)
    dataset = Dataset(folder.parent, tmp_path)
    assert dataset.make() == counts(items=2, units_read=2)
    reference.write_bytes(other := picture(9))
    assert dataset.make() == counts(items=1, removed=1, units_read=1)
    assert kept(tmp_path) == {sha256(picture(0)), sha256(other)}


def test_an_item_that_refers_to_the_medium_of_another_is_left_out(tmp_path: Path):
    (folder := tmp_path / "edits").mkdir()
    for number, reference in enumerate(("0.png", "./0.png", "2.png")):
        edit(folder, number, reference)
    dataset = Dataset(folder, tmp_path, max_left_out=0.5)
    assert dataset.make() == counts(items=2, left_out=1, units_read=3)
    said = "the reference ./0.png is the medium of another item; put a copy into a folder of its own"
    assert dataset.left_out()[["name", "reason"]].to_numpy().tolist() == [["1", said]]
    (folder / "2.png").write_bytes(picture(9))
    assert dataset.make() == counts(items=1, removed=1, left_out=1, units_read=1)
    assert kept(tmp_path) == {sha256(picture(100)), sha256(picture(102)), sha256(picture(9))}


def test_items_whose_references_cannot_be_used_are_left_out_by_name_until_they_are_mended(folder: Path, tmp_path: Path):
    before, frames = folder / "before", [Image.fromarray(np.full((8, 8, 3), grey, np.uint8)) for grey in (0, 255)]
    (before / "0.png").unlink()
    frames[0].save(before / "1.png", save_all=True, append_images=frames[1:])
    (before / "2.png").write_bytes(b"no picture")
    edit(folder, 1, "before/1.png")
    edit(folder, 4, "../outside.png")
    (tmp_path / "outside.png").write_bytes(picture(0))
    (folder / "5.json").write_text('{"prompt": "x", "references": "before/2.png"}', encoding="utf-8")
    (folder / "5.png").write_bytes(picture(5))
    dataset = Dataset(folder, tmp_path, max_left_out=1.0)
    assert dataset.make() == counts(items=1, left_out=5, units_read=6)
    reasons = dict(zip(dataset.left_out()["name"], dataset.left_out()["reason"], strict=True))
    assert reasons["0"] == f"no file at {before / '0.png'}"
    assert reasons["1"].startswith("before/1.png: an animation of 2 pictures")
    assert reasons["2"].startswith("before/2.png: no picture and no clip that can be decoded")
    assert reasons["4"].startswith("the reference ../outside.png is outside the folder")
    assert (
        reasons["5"]
        == "5.json: expected \"references\" to be a list of paths of pictures or clips, found 'before/2.png'"
    )
    assert kept(tmp_path) == set()
    (before / "0.png").write_bytes(picture(0))
    assert dataset.make() == counts(items=1, left_out=4, units_read=1)
    assert kept(tmp_path) == {sha256(picture(0))}


def test_equal_media_and_texts_with_other_references_are_no_duplicates(folder: Path, tmp_path: Path):
    for number, reference in ((5, "before/0.png"), (6, "before/1.png")):
        edit(folder, number, reference)
        shutil.copy(folder / "0.png", folder / f"{number}.png")
    dataset = Dataset(folder, tmp_path, duplicates="drop")
    dataset.make()
    assert {*dataset.left_out()["name"]} == {"5"}
    assert {*dataset.all.items["name"]} == {"0", "1", "2", "3", "6"}


def test_pictures_of_items_that_are_left_out_for_other_reasons_are_not_kept(folder: Path, tmp_path: Path):
    dataset = Dataset(folder, tmp_path, min_size=(100, 100), max_left_out=1.0)
    assert dataset.make()["items"] == 0
    assert kept(tmp_path) == set()


def test_a_picture_that_was_lost_since_an_attempt_stored_it_is_read_again(folder: Path, tmp_path: Path):
    pool = tmp_path / "store" / "dataset" / PICTURES
    dataset = Dataset(folder, tmp_path, max_left_out=0.0, units_per_shard=2)
    edit(folder, 9)
    (folder / "9.json").write_text('{"prompt": " "}', encoding="utf-8")
    with pytest.raises(DatasetError, match="1 of 5 items cannot be used"):
        dataset.make()
    assert kept(tmp_path) == {*DIGESTS}
    (pool / DIGESTS[2]).unlink()
    (pool / DIGESTS[1]).write_bytes(b"damaged")
    dataset.settings["max_left_out"] = 1.0
    assert dataset.make() == counts(items=4, left_out=1, units_read=5)
    assert kept(tmp_path) == {*DIGESTS}


def test_a_verification_mends_a_damaged_picture(folder: Path, tmp_path: Path):
    dataset = Dataset(folder, tmp_path)
    dataset.make()
    (tmp_path / "store" / "dataset" / PICTURES / DIGESTS[0]).write_bytes(b"damaged")
    dataset.settings["verify"] = True
    assert dataset.make() == counts(units_read=4) | {"differing": 0}
    assert kept(tmp_path) == {*DIGESTS}


def test_tars_and_rows_keep_the_same_pictures_as_folders(folder: Path, tmp_path: Path):
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    for number, names in ((0, [0]), (1, [0, 1]), (2, [2])):
        about = json.loads(files[f"{number}.json"]) | {"references": [f"ref{n}.png" for n in names]}
        files[f"{number}.json"] = json.dumps(about).encode()
        files |= {f"{number}.ref{n}.png": (folder / "before" / f"{n}.png").read_bytes() for n in names}
    (tmp_path / "0.tar").write_bytes(shard(files))
    referred = [[0], [0, 1], [2], []]
    pictures = [{"bytes": picture(n, (16, 24 + n)), "path": None} for n in range(3)]
    rows = {
        "image": hf_folder.media([files[f"{n}.png"] for n in range(4)]),
        "references": pa.array([[pictures[n] for n in some] for some in referred], pa.list_(hf_folder.MEDIUM)),
        "text": pa.array(["a hat", "a hat", "a coat", "a hat"]),
    }
    features = {"image": {"_type": "Image"}, "references": {"_type": "List", "feature": {"_type": "Image"}}}
    hf_folder.save(tmp_path / "rows", rows, features)
    found: list[list[str]] = []
    for source in (
        local.Options(local_dir=str(folder)),
        web.Options(urls=(str(tmp_path / "0.tar"),)),
        hf.Options(local_dir=str(tmp_path / "rows")),
    ):
        dataset = Dataset(folder, tmp_path / source.name)
        dataset.sources = {"mine": source}
        dataset.make()
        assert kept(tmp_path / source.name) == {*DIGESTS}
        found.append(dataset.all.items.sort_values("name")["prompt_id"].tolist())
    assert found[0] == [
        prompt_id(text, [DIGESTS[n] for n in some])
        for text, some in zip(rows["text"].to_pylist(), referred, strict=True)
    ]
    assert found[1] == found[2] == found[0]


def test_a_row_with_a_reference_without_bytes_is_left_out(tmp_path: Path):
    rows = {
        "image": hf_folder.media([picture(0), picture(1)]),
        "references": hf_folder.media([picture(2), None]),
        "text": pa.array(["a", "b"]),
    }
    features = {"image": {"_type": "Image"}, "references": {"_type": "Image"}}
    hf_folder.save(tmp_path / "rows", rows, features)
    dataset = Dataset(tmp_path, tmp_path, max_left_out=0.5)
    dataset.sources = {"mine": hf.Options(local_dir=str(tmp_path / "rows"))}
    assert dataset.make() == counts(items=1, left_out=1, units_read=1)
    assert dataset.left_out()["reason"].tolist() == ["reference 1: no bytes; a path alone is not read"]


def test_a_folder_in_s3_gives_the_same_pictures_as_one_on_a_disk(folder: Path, s3_url: str, tmp_path: Path):
    root = f"{s3_url}/{secrets.token_hex(4)}"
    for path in folder.rglob("*.*"):
        store.write(f"{root}/{path.relative_to(folder)}", path.read_bytes())
    dataset = Dataset(folder, tmp_path)
    dataset.sources = {"mine": local.Options(local_dir=root)}
    assert dataset.make() == counts(items=4, units_read=4)
    assert kept(tmp_path) == {*DIGESTS}
    store.write(f"{root}/before/2.png", picture(9))
    assert dataset.make() == counts(items=1, removed=1, units_read=1)
    assert kept(tmp_path) == {*DIGESTS, sha256(picture(9))}
