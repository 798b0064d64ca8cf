"""What of the settings of a dataset's stages identifies its parts."""

import shutil
from pathlib import Path

from stages import contracts
from tests.stages.test_index import Dataset, folder

__all__ = ["folder"]


def test_bounds_that_are_not_set_change_no_recipe():
    plain = contracts.Index(sources={}, stamps="")
    assert plain.identity().keys().isdisjoint({"max_frames", "max_seconds"})
    assert contracts.Index(sources={}, stamps="", max_seconds=2).identity()["max_seconds"] == 2.0


def test_the_place_of_the_files_is_no_part_of_the_recipe(folder: Path, tmp_path: Path):
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved, copy_function=shutil.copy2)
    ours, theirs = (Dataset(place, tmp_path).request() for place in (folder, moved))
    assert ours.recipe == theirs.recipe
