"""Captions in files next to their media."""

from pathlib import Path

import pytest

from cosmos_rl_core.errors import ConfigError, NoSpaceError
from flows.operations.caption_files import write_captions
from tests.flows.cli.data.test_data_commands import PROMPT
from tests.little_room import little_room


def test_a_full_disk_leaves_no_truncated_caption(tmp_path: Path):
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos/a.mp4").touch()
    with little_room(4), pytest.raises(NoSpaceError):
        write_captions(str(tmp_path), PROMPT, is_image=False)
    assert list((tmp_path / "metas").iterdir()) == []


def test_a_file_in_the_place_of_the_folder_of_captions_is_a_mistake(tmp_path: Path):
    (tmp_path / "videos").mkdir()
    (tmp_path / "metas").touch()
    with pytest.raises(ConfigError, match=r"cannot write .*/metas: File exists"):
        write_captions(str(tmp_path), PROMPT, is_image=False)
