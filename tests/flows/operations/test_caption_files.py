"""Captions in files next to their media."""

from pathlib import Path

import pytest

from cosmos_rl_core.errors import NoSpaceError
from flows.operations.caption_files import write_captions
from tests.flows.cli.data.test_data_commands import PROMPT
from tests.little_room import little_room


def test_a_full_disk_leaves_no_truncated_caption(tmp_path: Path):
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos/a.mp4").touch()
    with little_room(4), pytest.raises(NoSpaceError):
        write_captions(str(tmp_path), PROMPT, is_image=False)
    assert list((tmp_path / "metas").iterdir()) == []
