"""Pages of the media of a dataset."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cosmos_rl_core.errors import ConfigError
from flows.operations.show_data import show
from stages.artifacts import snapshots
from tests.flows.operations.test_preprocess import add, config_of, prepare


def shown(tmp_path: Path, name: str = "clips", first: int = 100, *, all_pages: bool = False) -> tuple[str, list[str]]:
    """The first page and the lines that are printed."""
    output = tmp_path / "shown"
    lines = list(show(str(tmp_path / "store"), name, str(output), first, all_pages=all_pages).lines())
    return (output / "1.html").read_text(encoding="utf-8"), lines


def test_a_page_shows_media_captions_sizes_and_left_out_files(tmp_path: Path):
    clips = tmp_path / "clips"
    for number in range(3):
        add(clips, number)
    (clips / "0001.json").write_text(json.dumps({"prompt": "<script>alert(1)</script> & more"}), encoding="utf-8")
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(clips / "0004.png")
    prepare(config_of(clips, min_size=(8, 8), max_left_out=0.5, caption={"by": "text", "text": "a thing"}), tmp_path)
    page, lines = shown(tmp_path)
    assert page.count("data:image/jpeg;base64,") == 3
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in page
    assert "<script" not in page
    assert "picture 2" in page
    assert "8 x 8" in page
    assert "4 x 4 pixels, expected at least 8 x 8" in page
    assert lines[:5] == [
        "3 items in 1 parts",
        "3 media",
        "3 captions",
        "0 items captioned by a captioner",
        "1 left out",
    ]


def test_pages_have_a_bounded_number_of_items(tmp_path: Path):
    clips = tmp_path / "clips"
    for number in range(5):
        add(clips, number)
    prepare(config_of(clips), tmp_path)
    page, lines = shown(tmp_path, first=2)
    assert (page.count("<img"), "Items 1 to 2 of 5." in page) == (2, True)
    assert [path.name for path in (tmp_path / "shown").iterdir()] == ["1.html"]
    assert lines[-1] == "--all writes pages of the others"
    page, lines = shown(tmp_path, first=2, all_pages=True)
    assert '<a href="2.html">next</a>' in page
    assert sorted(path.name for path in (tmp_path / "shown").iterdir()) == ["1.html", "2.html", "3.html"]
    assert lines[-1] == "3 pages of 2 items"


def test_changed_and_missing_media_are_marked(tmp_path: Path):
    clips = tmp_path / "clips"
    for number in range(3):
        add(clips, number)
    prepare(config_of(clips), tmp_path)
    (clips / "0000.png").unlink()
    (clips / "0001.png").write_bytes((clips / "0002.png").read_bytes())
    page, _ = shown(tmp_path, "clips@1")
    assert page.count("<img") == 1
    assert page.count("has changed since it was indexed") == 2
    clips.rename(tmp_path / "away")
    page, _ = shown(tmp_path)
    assert page.count("no folder at") == 3


def test_a_source_that_this_machine_does_not_know_is_named(tmp_path: Path):
    add(tmp_path / "clips", 0)
    prepare(config_of(tmp_path / "clips"), tmp_path)
    snapshot = snapshots.newest(str(tmp_path / "store"), "clips")
    assert snapshot is not None
    elsewhere = {"mine": {"name": "theirs"}}
    snapshots.put(str(tmp_path / "store"), snapshot.model_copy(update={"number": 2, "sources": elsewhere}))
    page, _ = shown(tmp_path)
    assert "unknown dataset &#39;theirs&#39;" in page


def test_a_file_in_the_place_of_the_folder_of_pages_is_a_mistake(tmp_path: Path):
    add(tmp_path / "clips", 0)
    prepare(config_of(tmp_path / "clips"), tmp_path)
    (tmp_path / "shown").touch()
    with pytest.raises(ConfigError, match=r"cannot write .*/shown/1\.html: File exists; name another"):
        shown(tmp_path)
