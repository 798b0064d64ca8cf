"""Settings as they are read: files of Windows editors, paths."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from cosmos_rl_core.captioners import vlm
from cosmos_rl_core.config.reading import read_toml, with_changes
from cosmos_rl_core.datasets import hf, local, ocr, prompt_set, prompts, web


def test_paths_may_begin_with_the_home_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/me")
    places = [
        prompts.Options(path="~/x").path,
        prompt_set.Options(set="ocr", local_dir="~/x").local_dir,
        ocr.Options(local_dir="~/x").local_dir,
        local.Options(local_dir="~/x").local_dir,
        hf.Options(local_dir="~/x").local_dir,
        *web.Options(urls=("~/x",)).urls,
        vlm.Options(model="~/x", instruction="?").model,
        *with_changes({"plugins": ["~/x"]}, Path("/recipes/a.toml"), (), None)["plugins"],
        *with_changes({}, Path("/recipes/a.toml"), ['recipes=["~/x"]'], None)["recipes"],
    ]
    assert {*places} == {"/home/me/x"}
    assert local.Options(local_dir="s3://clips/~/x").local_dir == "s3://clips/~/x"


def test_a_file_may_begin_with_a_mark_of_the_byte_order(tmp_path: Path):
    (tmp_path / "recipe.toml").write_bytes("[train]\r\nseed = 1\r\n".encode("utf-8-sig"))
    assert read_toml(tmp_path / "recipe.toml", "") == {"train": {"seed": 1}}


def test_a_text_that_cannot_be_a_path_is_refused_when_it_is_read():
    for path in ("a\0b", f"a/{'é' * 128}/b"):
        with pytest.raises(ValidationError, match="which no path has"):
            prompts.Options(path=path)
    assert prompts.Options(path=f"a/{'é' * 127}/b").path.endswith("é/b")
    assert hf.Options(local_dir=f"s3://clips/{'a' * 300}").local_dir.endswith("aaa"), "names of objects may be longer"
