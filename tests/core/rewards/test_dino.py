"""DINOv2 models: files that a folder lacks, or whose images would have several sizes."""

from pathlib import Path

import pytest

from cosmos_rl_core.errors import ConfigError
from tests import tiny_scorers
from tests.core.rewards.test_similarities import made, several


def test_files_that_dino_lacks_are_named(tmp_path: Path):
    settings = tiny_scorers.settings("dino_similarity", tmp_path)
    processor = tmp_path / "preprocessor_config.json"
    text = processor.read_text()
    processor.write_text(text.replace('"do_center_crop": true', '"do_center_crop": false'))
    assert processor.read_text() != text
    with pytest.raises(ConfigError, match=r"makes images of several sizes.*set do_resize and do_center_crop there"):
        made("dino_similarity", settings).score(several())
    processor.unlink()
    with pytest.raises(ConfigError, match=r"a DINOv2 model needs .*preprocessor_config\.json; fetch it"):
        _ = made("dino_similarity", settings).version
