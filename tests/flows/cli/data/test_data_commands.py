"""Commands that show a dataset, and that write captions into files."""

from pathlib import Path

import pytest

from flows.operations.caption_files import write_captions
from tests.flows.operations.test_preprocess import add, config_of, prepare

PROMPT = "A video of sks teal robot."


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


def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path, main):
    add(tmp_path / "clips", 0)
    prepare(config_of(tmp_path / "clips"), tmp_path)
    (tmp_path / "videos").mkdir()
    for name in ("pages", "metas"):
        (tmp_path / name).touch()
    show = ("data", "show", "clips", "--store", str(tmp_path / "store"), "--output")
    for words, said in (
        ((*show, str(tmp_path / "pages")), f"cannot write {tmp_path}/pages/1.html: "),
        ((*show, str(tmp_path / "pages" / "more")), f"cannot write {tmp_path}/pages/more/1.html: "),
        (("data", "caption-files", str(tmp_path), "--prompt", PROMPT), f"cannot write {tmp_path}/metas"),
    ):
        code, _, told = main(*words)
        assert (code, told.startswith(said), "Traceback" in told) == (64, True, False), told
