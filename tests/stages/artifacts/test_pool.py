"""Pictures that datasets share, while they are being deleted."""

import os
from pathlib import Path

import pytest

from cosmos_rl_core.errors import UnavailableError
from stages.artifacts.pool import put_picture, sweeping
from tests.stages.test_index_references import picture


def test_no_picture_is_stored_while_pictures_are_being_deleted(tmp_path: Path):
    root = str(tmp_path / "dataset")
    with sweeping(root), pytest.raises(UnavailableError, match="are being deleted"):
        put_picture(root, picture(0))
    entry = put_picture(root, picture(0))
    os.utime(path := Path(root, entry.path), (0, 0))
    assert put_picture(root, picture(0)) == entry
    assert path.stat().st_mtime > 0
