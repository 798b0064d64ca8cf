"""Parts of a dataset, and the references of their items."""

import shutil
from pathlib import Path

from cosmos_rl_core.canonical import sha256
from stages.artifacts.artifact import Artifact
from stages.formats.parts import Parts
from stages.formats.references import Pictures
from tests.stages.training.test_reference_datasets import on_snapshots, snapshot_of
from tests.stages.training.test_reference_media import prepared, supervised


def test_a_part_keeps_the_references_of_its_items_and_a_later_one_adds_its_own(tmp_path: Path):
    (inputs := tmp_path / "inputs").mkdir()
    values = supervised("flux2_klein", inputs)
    folder = inputs / "media"
    data = {number: (folder / "sources" / f"{number}.png").read_bytes() for number in range(4)}
    run = prepared(tmp_path, on_snapshots(values, tmp_path))
    pinned = run.plan.data_snapshot
    assert pinned is not None
    assert pinned.pictures == ((64, 96),)
    pictures = Pictures(run.prepared.data.embeds[0].slot)
    assert [pictures.data(sha256(one)) for one in data.values()] == [*data.values()]
    shutil.copy(folder / "sources" / "0.png", folder / "sources" / "4.png")
    (folder / "sources" / "1.png").write_bytes(data[3])
    shutil.copy(folder / "images" / "0.png", folder / "images" / "4.png")
    (folder / "metas" / "4.json").write_text('{"prompt": "new", "references": ["sources/4.png"]}', encoding="utf-8")
    head = snapshot_of("clips", values["train"]["train_policy"]["dataset"], tmp_path)
    parts = Parts([Artifact(part) for part in head.parts])
    assert len(head.parts) == 2
    assert sorted(parts.all_items.query("part == 1")["name"]) == ["1", "4"]
    assert sorted(parts.items["name"]) == [*"01234"]
    assert Artifact(head.parts[1]).json("index.json").keys() == {sha256(data[3]), sha256(data[0])}
    assert pictures.data(sha256(data[1])) == data[1]
