"""References that a model or a reward cannot take are found when a run is planned."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from PIL import Image

from cosmos_rl_core.conformance.kinds.hf_folder import MEDIUM, media, save
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.errors import ConfigError
from flows.checking.snapshots import check_references
from tests.flows.planning.test_plan import mistakes_of

OCR = 'name = "ocr"\nlocal_dir = '


@pytest.fixture(scope="module")
def klein(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_pipelines.save("flux2_klein", tmp_path_factory.mktemp("pipelines") / "klein"))


def prompts(folder: Path, *counts: int, side: int = 64) -> str:
    """A line for the recipe: prompts with so many references each."""
    for number in range(max(counts)):
        pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    rows = [{"prompt": f"x{n}", "references": [f"{i}.png" for i in range(c)]} for n, c in enumerate(counts)]
    (folder / "edits.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return f'name = "prompts"\npath = "{folder}/edits.jsonl" # '


def test_a_model_that_takes_no_references_refuses_them(recipe, tmp_path: Path):
    message = mistakes_of(recipe((OCR, prompts(tmp_path, 1, 1))))
    assert "StableDiffusion3Pipeline takes no references; 2 prompts have some, e.g. p-" in message


def test_prompts_with_unequal_numbers_and_too_small_pictures_are_refused(recipe, tmp_path: Path, klein: str):
    base = ("package:tiny-sd3", klein)
    message = mistakes_of(recipe(base, (OCR, prompts(tmp_path, 1, 2))))
    assert "prompts have 1 and 2 references; expected equally many in all" in message
    message = mistakes_of(recipe(base, (OCR, prompts(tmp_path, 1, 1, side=32))))
    assert f"{tmp_path / '0.png'}: a reference of 32 x 32 pixels" in message


def test_rows_with_unequal_numbers_and_too_small_pictures_are_refused(recipe, tmp_path: Path, klein: str):
    prompts(tmp_path, 2, side=32)
    data = [(tmp_path / f"{number}.png").read_bytes() for number in range(2)]
    lists = [[{"bytes": one, "path": ""} for one in data[:count]] for count in (1, 2)]
    columns = {"text": pa.array(["x", "y"]), "references": pa.array(lists, pa.list_(MEDIUM))}
    save(tmp_path / "unequal", columns, {})
    save(tmp_path / "small", {"text": pa.array(["x", "y"]), "references": media(data)}, {})
    base = ("package:tiny-sd3", klein)
    row = 'name = "hf"\nlocal_dir = "{}" # '
    message = mistakes_of(recipe(base, (OCR, row.format(tmp_path / "unequal"))))
    assert "prompts have 1 and 2 references; expected equally many in all" in message
    message = mistakes_of(recipe(base, (OCR, row.format(tmp_path / "small"))))
    for line in message.splitlines()[-2:]:
        assert "/small/data-00000-of-00001.arrow, bytes " in line
        assert "a reference of 32 x 32 pixels" in line


def test_a_reward_that_compares_with_references_needs_them(recipe):
    served = 'name = "remote", reward_fn = "x", references = "needed"'
    for reward, label in (('name = "pixel_similarity"', "pixel_similarity"), (served, "remote-x")):
        message = mistakes_of(recipe(('name = "ocr", line_width = 96', reward)))
        assert f"{label} compares with references; the prompts have none" in message


@pytest.mark.parametrize(
    ("source", "value", "expected"),
    [
        (
            "local",
            ["a.png"],
            "1 items of it name references that were not kept, e.g. 1: an earlier .* --verify",
        ),
        ("web", ["a.png"], "1 items of it name references that were not kept, e.g. 1: an earlier .* --verify"),
        ("hf", ["a.png"], r"1 items of it have a column or key `references` without .* 1: \['a.png'\]; rename it"),
        ("web", "Smith 2001", "1 items of it have a column or key `references` without .* 1: 'Smith 2001'; rename it"),
        ("local", [1], r"1 items of it have a column or key `references` without .* 1: \[1\]; rename it"),
    ],
)
def test_unkept_references_and_other_columns_of_that_name_get_different_advice(source: str, value: Any, expected: str):
    told = [json.dumps({"references": one}) for one in ([], value, value)]
    items = pd.DataFrame(
        {"name": ["0", "1", "2"], "unit": "mine/x", "metadata": told, "references": [None, None, "[]"]}
    )
    with pytest.raises(ConfigError, match=expected):
        check_references(items, "it", {"mine": {"name": source}})
    check_references(items.drop(index=1), "it", {"mine": {"name": source}})
    check_references(items[:0], "it", {})
