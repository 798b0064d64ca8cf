"""The tiny editing model, its edits, and the recipes that train it."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.tiny import edits
from flows.planning.plan import Settings, plan_of
from tests.pages import ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The place that the recipes name, below the folder that they are run in."""
    folder = tmp_path_factory.mktemp("edits")
    edits.main([str(folder / "outputs/tiny-edits")])
    return folder


def test_each_picture_has_two_results_and_held_out_ones_have_none(folder: Path):
    made = folder / "outputs/tiny-edits"
    rows = {name: [json.loads(line) for line in (made / f"{name}.jsonl").read_text().splitlines()] for name in (
        "train", "held-out")}  # fmt: skip
    assert [len(some) for some in rows.values()] == [56, 8]
    results = sorted(file.stem for file in (made / "edits").glob("*.png"))
    assert len(results) == 2 * 56
    for row in rows["train"]:
        before = np.asarray(Image.open(made / row["references"][0]))
        number = Path(row["references"][0]).stem
        kept, mirrored = (
            np.asarray(Image.open(made / "edits" / f"{number}-{name}.png")) for name in ("kept", "mirrored")
        )
        assert np.array_equal(kept, before[16:48])
        assert np.array_equal(mirrored, kept[:, ::-1])
    held_out = {Path(row["references"][0]).stem for row in rows["held-out"]}
    assert not held_out & {name.partition("-")[0] for name in results}


def test_the_recipes_of_the_tiny_editing_model_plan(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    plan = plan_of(Settings(str(ROOT / "configs/tiny/edit_sft.toml")))
    assert (len(plan.prompts), len(plan.validation_prompts)) == (56, 8)
    assert plan.basis.pictures == ((64, 64),)
    with pytest.raises(ConfigError) as error:
        plan_of(Settings(str(ROOT / "configs/tiny/edit_nft.toml")))
    (_, mistake) = str(error.value).splitlines()
    assert "edit-sft" in mistake
