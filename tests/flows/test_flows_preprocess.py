"""The preparation of a dataset as a flow: what is refused before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from flows.devices.devices import VISIBLE
from flows.preprocess import preprocess


def test_stages_that_fit_no_device_and_mistakes_of_the_file_fail_the_flow_at_once(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(VISIBLE, ",".join(f"GPU-{number}" for number in range(8)))
    source = f'[sources.mine]\nname = "local"\nlocal_dir = "{pictures}"\n'
    (tmp_path / "recipe.toml").write_text("[train]\nnum_iterations = 0\n", encoding="utf-8")
    file, profile = tmp_path / "clips.toml", tmp_path / "profile.toml"
    file.write_text(f'name = "clips"\nrecipes = ["recipe.toml"]\n{source}', encoding="utf-8")
    profile.write_text("[launch]\ngpus = 4\nprocesses = 8\n", encoding="utf-8")
    state: Any = preprocess.fn(str(file), str(tmp_path / "store"), ["captioned"], str(profile))
    assert state.is_failed()
    for said in (
        "cannot read override 'captioned'",
        "train.num_iterations: Input should be",
        "embed, encode: 8 GPUs each",
    ):
        assert said in state.message
    assert not (tmp_path / "store").exists()
