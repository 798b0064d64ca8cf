"""Weights of models that rate, and the settings next to them."""

from pathlib import Path

from cosmos_rl_core.rewards._vlm import rating_weights
from tests.nested import require_named


def test_a_file_that_is_nested_too_deep_is_named(tmp_path: Path):
    require_named(tmp_path, rating_weights.json_of)
