"""Pictures that prepared datasets refer to, in the store: what deletes them, and who finds that they were changed."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.datasets._base import prompt_id
from cosmos_rl_core.errors import DatasetError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.media import encode
from flows.auditing.audit import audit
from flows.garbage import datasets as garbage
from flows.garbage.pool import Pool
from flows.operations.show_data import show
from stages.artifacts import snapshots
from stages.artifacts.artifact import Artifact
from stages.artifacts.pool import PICTURES, put_picture
from stages.formats.parts import Parts, references_in
from tests.flows.garbage.test_gc_meanwhile import During
from tests.flows.prepared import add, age, collect, prepare, run_on
from tests.stages.test_index import Dataset, counts
from tests.stages.training.test_reference_datasets import on_snapshots, prepared
from tests.stages.training.test_reference_media import supervised

POOLED = "files of texts and references"


def picture(seed: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def refer(clips: Path, number: int, *pictures: int) -> None:
    """Lets a caption refer to pictures."""
    (clips / "before").mkdir(exist_ok=True)
    for one in pictures:
        (clips / "before" / f"{one}.png").write_bytes(picture(one))
    about = {"prompt": f"picture {number}", "references": [f"before/{one}.png" for one in pictures]}
    (clips / f"{number:04d}.json").write_text(json.dumps(about), encoding="utf-8")


def pool(url: str) -> set[str]:
    return set(store.names(f"{url}/dataset/{PICTURES}"))


def digests(*pictures: int) -> set[str]:
    return {sha256(picture(one)) for one in pictures}


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """Three media with a reference each."""
    (clips := tmp_path / "clips").mkdir()
    add(clips, 0, 1, 2)
    for number in range(3):
        refer(clips, number, number)
    return clips


def test_a_dataset_with_the_name_of_the_folder_of_pictures_stays(clips: Path, store_url: str):
    snapshot = prepare(clips, store_url, name=PICTURES)
    age(store_url)
    assert collect(store_url) == {"used index": (1, 9), f"used {POOLED}": (0, 3)}
    assert snapshots.newest(store_url, PICTURES) == snapshot


def test_pictures_go_with_the_last_part_whose_items_refer_to_them(clips: Path, tmp_path: Path):
    url = str(tmp_path / "store")
    prepare(clips, url)
    refer(clips, 0, 1, 3)
    prepare(clips, url)
    put_picture(f"{url}/dataset", picture(9))
    age(url)
    assert collect(url)[f"unused {POOLED}"] == (0, 1)
    assert pool(url) == digests(0, 1, 2, 3)
    prepare(clips, url, merge=True)
    age(url)
    assert collect(url, keep=1)[f"unused {POOLED}"] == (0, 1)
    assert pool(url) == digests(1, 2, 3)
    prepare(clips, url, merge=True)
    assert pool(url) == digests(1, 2, 3)


def test_a_run_keeps_the_pictures_of_the_snapshot_that_it_pins(clips: Path, tmp_path: Path):
    url = str(tmp_path / "store")
    for number in range(3):
        (clips / f"{number:04d}.json").write_text('{"prompt": "a"}', encoding="utf-8")
    prepare(clips, url)
    run_on(url, "run")
    for number in range(3):
        refer(clips, number, number)
    prepare(clips, url)
    (clips / "0000.json").write_text('{"prompt": "a"}', encoding="utf-8")
    prepare(clips, url, merge=True)
    age(url)
    collect(url, keep=1)
    assert pool(url) == digests(1, 2)


def test_a_picture_that_is_stored_again_before_the_sweep_stays(clips: Path, tmp_path: Path, monkeypatch):
    """A preparation meanwhile finds an old file that nothing names, and will name it."""
    url = str(tmp_path / "store")
    prepare(clips, url)
    put_picture(f"{url}/dataset", picture(9))
    age(url)

    class Meanwhile(Pool):
        def sweep(self, paths, listing):
            put_picture(f"{url}/dataset", picture(9))
            return super().sweep(paths, listing)

    monkeypatch.setattr(garbage, "Pool", Meanwhile)
    collect(url)
    assert pool(url) == digests(0, 1, 2, 9)


def test_pictures_of_an_attempt_that_failed_long_ago_stay_for_the_next(clips: Path, tmp_path: Path, monkeypatch):
    (clips / "0009.json").write_text('{"prompt": " "}', encoding="utf-8")
    dataset, url = Dataset(clips, tmp_path, max_left_out=0.0, units_per_shard=2), str(tmp_path / "store")
    with pytest.raises(DatasetError, match="1 of 4 items cannot be used"):
        dataset.make()
    put_picture(f"{url}/dataset", picture(9))
    age(url)
    dataset.settings["max_left_out"] = 1.0
    middle = During(monkeypatch, "put_if_absent", r"part-0/manifest\.", lambda: garbage.gc_datasets(url))
    assert dataset.make() == counts(items=3, left_out=1, units_read=4)
    assert middle.done
    assert pool(url) == digests(0, 1, 2)


def test_an_audit_finds_a_changed_and_a_missing_picture(tmp_path: Path):
    (inputs := tmp_path / "inputs").mkdir()
    prepared(tmp_path, on_snapshots(supervised("flux2_klein", inputs), tmp_path))
    names = sorted(pool(str(tmp_path)))
    assert len(names) == 5, "one is in both folders"
    before = {(fault.file, fault.field) for fault in audit(str(tmp_path), "run").faults}
    place = tmp_path / "dataset" / PICTURES
    data = bytearray((place / names[0]).read_bytes())
    data[len(data) // 2] ^= 1
    (place / names[0]).write_bytes(bytes(data))
    (place / names[1]).unlink()
    found = audit(str(tmp_path), "run").faults
    new = [fault for fault in found if (fault.file, fault.field) not in before]
    assert sorted(fault.file.rpartition("/")[2] for fault in new) == names[:2]


def test_pages_of_a_dataset_show_references_before_the_media(clips: Path, tmp_path: Path):
    url = str(tmp_path / "store")
    refer(clips, 0, 1, 2)
    prepare(clips, url)
    show(url, "clips", str(tmp_path / "shown"), 100, all_pages=False)
    page = (tmp_path / "shown" / "1.html").read_text(encoding="utf-8")
    assert page.count("data:image/jpeg;base64,") == 3 + 4
    assert [page.count(f'alt="reference {number}"') for number in (1, 2, 3)] == [3, 1, 0]
    (tmp_path / "store" / "dataset" / PICTURES / sha256(picture(2))).unlink()
    show(url, "clips", str(tmp_path / "shown"), 100, all_pages=False)
    page = (tmp_path / "shown" / "1.html").read_text(encoding="utf-8")
    assert page.count("reference 1 is missing") == 1
    assert page.count("reference 2 is missing") == 1


def test_captions_of_a_captioner_are_of_the_first_frames_that_the_index_kept(tmp_path: Path):
    (clips := tmp_path / "clips").mkdir()
    frames = [np.random.default_rng(number).integers(0, 256, (5, 32, 48, 3), np.uint8) for number in range(2)]
    for number, clip in enumerate(frames):
        extension, data = encode(clip)
        (clips / f"{number}.{extension}").write_bytes(data)
    (clips / "1.txt").write_text("by hand", encoding="utf-8")
    url = str(tmp_path / "store")
    source = {"name": "local", "local_dir": str(clips), "first_frame": True, "size": [32, 48]}
    head = prepare(clips, url, sources={"mine": source}, caption={"by": "text", "text": "a clip"})
    parts = Parts([Artifact(one) for one in head.parts], [Artifact(one) for one in head.captions])
    kept = [sha256(encode(clip[:1])[1]) for clip in frames]
    assert pool(url) == {*kept}
    items = parts.items.sort_values("name")
    assert items["caption"].tolist() == ["a clip", "by hand"]
    assert items["prompt_id"].tolist() == [prompt_id("a clip", kept[:1]), prompt_id("by hand", kept[1:])]
    assert [one.digest for value in items["references"] for one in references_in(value)] == kept
