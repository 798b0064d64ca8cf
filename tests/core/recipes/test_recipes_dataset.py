"""Recipes of datasets."""

from pathlib import Path

import pytest

from cosmos_rl_core.recipes.dataset import read_dataset
from tests.test_rules import ROOT


@pytest.mark.parametrize("path", sorted((ROOT / "configs/data").glob("*.toml")), ids=lambda path: path.name)
def test_every_shipped_file_is_valid(path: Path):
    assert read_dataset(str(path)).sources
    assert read_dataset(f"package:data/{path.stem}") == read_dataset(str(path))
