"""Captions of a part: who gets one, what is kept, and what is left out."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.captioners import endpoint, text
from cosmos_rl_core.captioners._base import digest_of
from cosmos_rl_core.config.train import CaptionerOptions
from cosmos_rl_core.datasets._base import prompt_id
from cosmos_rl_core.errors import DatasetError, UnavailableError
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Input, Request
from stages.artifacts.slots import input_of
from stages.formats.parts import Parts
from stages.formats.tables import read_table
from tests.caption_server import CaptionServer, Reply, completion, serving
from tests.stages.conftest import make
from tests.stages.test_index import Dataset, caption, image

TEXT = text.Options(text=" a thing \n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three images without captions and one with."""
    folder = tmp_path / "source"
    for number in range(4):
        image(folder / "images" / f"{number:04d}.png", number)
    caption(folder, "0000", "by hand")
    return folder


class Captioned(Dataset):
    """A dataset whose parts are captioned in turn."""

    def __init__(self, folder: Path, tmp_path: Path) -> None:
        super().__init__(folder, tmp_path, captioned=False)
        self.captions: list[Input] = []

    def caption(self, captioner: CaptionerOptions = TEXT, **settings: Any) -> dict[str, Any]:
        """Caption the next part; return the summary."""
        number = len(self.captions)
        config = contracts.Caption(captioner=captioner, part=number, sources=self.sources, **settings)
        inputs = {"parts": tuple(self.parts), "captions": tuple(self.captions)}
        slot = f"{self.tmp_path}/store/dataset/captions-{number}"
        request = Request(stage="caption", slot=slot, seed=0, config=config, inputs=inputs)
        manifest = make(request, self.tmp_path)
        self.captions.append(input_of(request.slot))
        return {name: count for name, count in manifest.summary.items() if name != "seconds"}

    @property
    def all(self) -> Parts:
        return Parts([Artifact(part) for part in self.parts], [Artifact(one) for one in self.captions])


def counts(captioned: int = 0, left_out: int = 0, asked: int = 0) -> dict[str, int]:
    return {"captioned": captioned, "left_out": left_out, "asked": asked}


def served(server: CaptionServer, **settings: Any) -> CaptionerOptions:
    values = {"by": "endpoint", "url": server.url, "model": "vlm", "instruction": "Describe it.", "pause_s": 0.001}
    return endpoint.Options.model_validate(values | {"concurrency": 1, "tries": 2} | settings)


def test_items_without_a_caption_get_one_and_captions_by_hand_stay(folder: Path, tmp_path: Path):
    dataset = Captioned(folder, tmp_path)
    dataset.make()
    assert dataset.caption() == counts(captioned=3, asked=3)
    items = dataset.all.items
    assert items["caption"].tolist() == ["by hand", "a thing", "a thing", "a thing"]
    assert items["prompt_id"].tolist() == [prompt_id("by hand"), *[prompt_id("a thing")] * 3]
    assert items["captioner"].isna().tolist() == [True, False, False, False]
    assert set(items["captioner"].dropna()) == {digest_of(TEXT, ())}
    assert items["new_prompt"].tolist() == [True, True, False, False]
    assert items["new_medium"].all()
    assert list(dataset.all.left_out["name"]) == []


def test_a_caption_written_by_hand_later_replaces_the_captioners(folder: Path, tmp_path: Path):
    dataset = Captioned(folder, tmp_path)
    dataset.make()
    dataset.caption()
    caption(folder, "0001", "by hand too")
    dataset.make()
    assert dataset.caption() == counts()
    found = dataset.all.items.set_index("name")
    assert found["caption"].to_dict() == {
        "0000": "by hand",
        "0001": "by hand too",
        "0002": "a thing",
        "0003": "a thing",
    }
    assert not found.loc["0001", "new_medium"]
    assert found.loc["0001", "new_prompt"]


def test_a_known_medium_keeps_its_caption_without_a_call(folder: Path, tmp_path: Path):
    with serving() as server:
        dataset = Captioned(folder, tmp_path)
        dataset.make()
        assert dataset.caption(served(server)) == counts(captioned=3, asked=3)
        (folder / "images/0001.png").rename(folder / "images/0009.png")
        shutil.copy(folder / "images/0002.png", folder / "images/0008.png")
        image(folder / "images/0007.png", 7)
        shutil.copy(folder / "images/0007.png", folder / "images/0006.png")
        dataset.make()
        server.caption = lambda asked: completion("another")
        assert dataset.caption(served(server)) == counts(captioned=4, asked=1)
        found = dataset.all.items.set_index("name")["caption"]
        assert found["0009"] == found["0008"] == found["0002"] == "1 of 20 x 30"
        assert found["0006"] == found["0007"] == "another"
        other = Parts([], [Artifact(one) for one in dataset.captions]).written["captioner"]
        assert other.nunique() == 1
        image(folder / "images/0010.png", 1)
        dataset.make()
        assert dataset.caption(served(server, instruction="In a word.")) == counts(captioned=1, asked=1)


def test_refused_media_are_left_out_with_the_reason_up_to_a_limit(folder: Path, tmp_path: Path):
    with serving(replies=[completion("no", refusal="never")]) as server:
        dataset = Captioned(folder, tmp_path)
        dataset.make()
        with pytest.raises(DatasetError, match=r"1 of 4 items have no caption, more than max_left_out = 0.2"):
            dataset.caption(served(server), max_left_out=0.2)
        asked = len(server.asked)
        assert dataset.caption(served(server), max_left_out=0.25) == counts(captioned=2, left_out=1, asked=3)
        assert len(server.asked) == asked
        assert dataset.all.items["name"].tolist() == ["0000", "0002", "0003"]
        assert dataset.all.left_out.to_dict("records") == [
            {"unit": "mine/0001", "name": "0001", "reason": "the model refused: never"}
        ]
        assert read_table(Artifact(dataset.captions[0]), contracts.Caption.ASKED)["reason"].tolist()[0]
        (folder / "images/0001.png").unlink()
        dataset.make()
        assert dataset.caption(served(server)) == counts()
        assert list(dataset.all.left_out["name"]) == []


def test_a_medium_counts_as_new_in_the_part_that_first_uses_it(folder: Path, tmp_path: Path):
    with serving(replies=[completion("")]) as server:
        dataset = Captioned(folder, tmp_path)
        dataset.make()
        dataset.caption(served(server), max_left_out=1.0)
        shutil.copy(folder / "images/0001.png", folder / "images/0005.png")
        caption(folder, "0005", "by hand")
        dataset.make()
        dataset.caption(served(server), max_left_out=1.0)
        found = dataset.all.items.set_index("name").loc["0005"]
        assert (found["part"], found["new_medium"], found["new_prompt"]) == (1, True, False)


def test_too_many_refusals_end_captioning_early(folder: Path, tmp_path: Path):
    with serving(caption=lambda asked: completion("")) as server:
        dataset = Captioned(folder, tmp_path)
        dataset.make()
        with pytest.raises(DatasetError, match="0001: the model answered nothing"):
            dataset.caption(served(server), media_per_shard=1)
        assert len(server.asked) == 1


def test_a_killed_captioning_goes_on_with_its_finished_shards(folder: Path, tmp_path: Path):
    away = [completion("first"), completion("second"), Reply(503), Reply(503)]
    with serving(replies=away) as server:
        dataset = Captioned(folder, tmp_path)
        dataset.make()
        with pytest.raises(UnavailableError):
            dataset.caption(served(server), media_per_shard=2)
        assert dataset.caption(served(server), media_per_shard=2) == counts(captioned=3, asked=3)
        assert len(server.asked) == 5
        assert dataset.all.items["caption"].tolist() == ["by hand", "first", "second", "1 of 20 x 30"]


def test_media_that_the_service_could_not_take_are_asked_for_again_later(folder: Path, tmp_path: Path):
    with serving(replies=[Reply(400, "no model")]) as server:
        dataset = Captioned(folder, tmp_path)
        dataset.make()
        with pytest.raises(DatasetError, match="400"):
            dataset.caption(served(server))
        assert dataset.caption(served(server)) == counts(captioned=3, asked=3)
        assert len(server.asked) == 6


def test_a_file_that_has_changed_since_it_was_indexed_gets_no_caption(folder: Path, tmp_path: Path):
    with serving() as server:
        dataset = Captioned(folder, tmp_path)
        dataset.make()
        image(folder / "images/0002.png", 99)
        with pytest.raises(DatasetError, match="mine/0002 has changed since it was indexed"):
            dataset.caption(served(server))
        (folder / "images/0002.png").unlink()
        with pytest.raises(DatasetError, match="mine/0002 has changed since it was indexed"):
            dataset.caption(served(server))


def test_captioning_an_earlier_part_again_skips_items_that_have_gone(folder: Path, tmp_path: Path):
    dataset = Captioned(folder, tmp_path)
    dataset.make()
    (folder / "images/0001.png").unlink()
    image(folder / "images/0007.png", 7)
    dataset.make()
    with serving() as server:
        assert dataset.caption(served(server)) == counts(captioned=2, asked=2)
        assert dataset.caption(served(server)) == counts(captioned=1, asked=1)
    assert sorted(dataset.all.items["name"]) == ["0000", "0002", "0003", "0007"]
