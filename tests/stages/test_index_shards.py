"""Parts of a dataset of tar shards: a shard that changes is read again, the others are not."""

from pathlib import Path

import pytest

from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.datasets.web import Options
from cosmos_rl_core.errors import UnavailableError
from cosmos_rl_core.storage import http
from tests.core.datasets.test_web_dataset import picture, samples
from tests.file_server import serving
from tests.stages.test_index import Dataset, counts
from tests.tar_files import shard


def test_only_the_shard_that_changed_is_read_again(tmp_path: Path):
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "000.tar").write_bytes(samples(0, 1))
    (folder / "001.tar").write_bytes(samples(2, 3))
    dataset = Dataset(folder, tmp_path)
    dataset.sources = {"mine": Options(urls=(str(folder),))}
    assert dataset.make() == counts(items=4, units_read=2)
    items = dataset.all.items
    assert items["name"].tolist() == ["000.tar/0000", "000.tar/0001", "001.tar/0002", "001.tar/0003"]
    assert items["medium"].tolist() == [sha256(picture(number)) for number in range(4)]
    assert items["caption"].tolist() == [f"picture {number}" for number in range(4)]
    assert items[["height", "width", "frames"]].drop_duplicates().to_numpy().tolist() == [[8, 8, 1]]

    (folder / "001.tar").write_bytes(samples(3, 4, 0))
    assert dataset.make() == counts(items=2, removed=1, units_read=1)
    new = dataset.all.items.query("part == 1").set_index("name")
    assert new["new_medium"].to_dict() == {"001.tar/0000": False, "001.tar/0004": True}
    assert dataset.make() == counts()


def test_a_hostile_shard_and_a_damaged_sample_are_left_out_with_the_reason(tmp_path: Path):
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "000.tar").write_bytes(samples(0, 1))
    (folder / "001.tar").write_bytes(shard({"../../0.png": picture(0)}))
    (folder / "002.tar").write_bytes(shard({"0.png": picture(0)[:60], "0.txt": b"a", "1.txt": b"b"}))
    dataset = Dataset(folder, tmp_path, max_left_out=1.0)
    dataset.sources = {"mine": Options(urls=(str(folder),))}
    assert dataset.make() == counts(items=2, left_out=3, units_read=3)
    reasons = dataset.left_out().set_index("name")["reason"].to_dict()
    assert reasons["001.tar"].endswith("001.tar: '../../0.png' leads out of the folder")
    assert reasons["002.tar/0"].startswith("cannot be read")
    assert reasons["002.tar/1"] == "1: no image or video, only txt"
    assert not (tmp_path.parent / "0.png").exists()


def test_a_server_that_stops_answering_ends_the_stage_and_leaves_nothing_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http, "RETRY_FOR_S", 0.0)
    with serving() as server:
        server.files = {"/000.tar": samples(0), "/001.tar": samples(1)}
        dataset = Dataset(tmp_path, tmp_path, max_left_out=1.0)
        dataset.sources = {"mine": Options(urls=(f"{server.url}/{{000..001}}.tar",))}
        server.statuses = [200, 200, 200, 200, 503]  # two stamps twice, then the first shard
        with pytest.raises(UnavailableError):
            dataset.make()
        server.statuses = []
        assert dataset.make() == counts(items=2, units_read=2)
