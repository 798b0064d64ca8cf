"""Checkpoints that a model plugin does not support."""

import json
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.pipelines import checkpoints


def change(folder: Path, file: str, **settings: Any) -> None:
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | settings), encoding="utf-8")


@pytest.mark.parametrize(
    ("file", "settings", "words"),
    [
        ("model_index.json", {"boundary_ratio": 0.9}, "boundary_ratio = 0.9, so it is a Wan 2.2 A14B, of two tra"),
        ("model_index.json", {"expand_timesteps": True}, "the 5B model of Wan 2.2, which takes a picture as a WanPi"),
        ("transformer/config.json", {"pos_embed_seq_len": 514}, "a model of first and last frames; that is not supp"),
        ("transformer/config.json", {"in_channels": 16}, "takes 16 channels and the VAE makes 16, plus 20 of a mask"),
    ],
)
def test_models_that_take_pictures_in_another_way_are_refused(
    tmp_path: Path, file: str, settings: dict[str, Any], words: str
):
    folder = tiny_pipelines.save("wan_i2v", tmp_path / "base")
    checkpoints.check(str(folder))
    change(folder, file, **settings)
    with pytest.raises(ConfigError, match=words):
        checkpoints.check(str(folder))
