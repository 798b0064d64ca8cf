"""Pages that show a dataset, and captions that are written into files."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cosmos_rl_core.errors import NoSpaceError
from flows.operations.caption_files import write_captions
from flows.operations.show_data import show
from stages.artifacts import snapshots
from tests.flows.operations.test_preprocess import add, config_of, prepare
from tests.little_room import little_room

PROMPT = "A video of sks teal robot."


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


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("other", "known: clips; `cosmos-flows preprocess FILE --store "),
        ("clips@2", "clips has no snapshot 2; its newest is 1"),
        ("../clips", "names no snapshot; expected NAME or NAME@NUMBER"),
        ("clips@0", "names no snapshot"),
    ],
)
def test_a_missing_snapshot_is_named(name: str, said: str, tmp_path: Path, main):
    add(tmp_path / "clips", 0)
    prepare(config_of(tmp_path / "clips"), tmp_path)
    code, _, words = main("data", "show", name, "--store", str(tmp_path / "store"))
    assert (code, said in words) == (64, True)


def test_captions_are_written_byte_for_byte_where_there_are_none(tmp_path: Path, main):
    for name in ("b.mp4", "a.mp4", "c.mkv", "c.MP4"):
        (tmp_path / "videos").mkdir(exist_ok=True)
        (tmp_path / "videos" / name).touch()
    (tmp_path / "metas").mkdir()
    (tmp_path / "metas/b.txt").write_text("by hand", encoding="utf-8")
    code, printed, _ = main("data", "caption-files", str(tmp_path), "--prompt", PROMPT)
    assert code == 0
    assert printed.splitlines() == [
        f"Creating prompt files with text: {PROMPT}",
        f"Created 1 prompt files in {tmp_path}/metas",
        "Total prompt files: 2",
    ]
    assert (tmp_path / "metas/a.txt").read_bytes() == PROMPT.encode()
    assert (tmp_path / "metas/b.txt").read_bytes() == b"by hand"
    assert write_captions(str(tmp_path), PROMPT, is_image=False).created == 0


def test_a_full_disk_leaves_no_truncated_caption(tmp_path: Path):
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos/a.mp4").touch()
    with little_room(4), pytest.raises(NoSpaceError):
        write_captions(str(tmp_path), PROMPT, is_image=False)
    assert list((tmp_path / "metas").iterdir()) == []


def test_a_missing_media_folder_exits_with_the_codes_of_the_scripts(tmp_path: Path, main):
    code, _, words = main("data", "caption-files", str(tmp_path), "--prompt", PROMPT)
    assert (code, f"no folder {tmp_path}/videos" in words) == (2, True)
    code, _, words = main("data", "caption-files", str(tmp_path), "--prompt", PROMPT, "--is-image")
    assert (code, f"no folder {tmp_path}/images" in words) == (1, True)
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.jpg").touch()
    assert main("data", "caption-files", str(tmp_path), "--prompt", "line\nline ", "--is-image")[0] == 0
    assert (tmp_path / "metas/a.txt").read_bytes() == b"line\nline "
    assert main("data", "caption-files", str(tmp_path), "--is-image")[0] == 64
