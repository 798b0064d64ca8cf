"""Prompts with as many references as a family takes, against the stock pipeline. The suite has two at most."""

from pathlib import Path

import numpy as np
import pytest

from cosmos_rl_core.conformance.models.families import SCHEDULERS, SIZE
from cosmos_rl_core.conformance.models.references.referring import load_referring

SIDES = [(75, 131), (140, 66), (64, 64), (80, 96), (64, 120), (99, 64), (64, 65), (70, 70)]
PICTURES = [np.random.default_rng(i).integers(0, 256, (1, *sides, 3), np.uint8) for i, sides in enumerate(SIDES)]


@pytest.mark.parametrize(("name", "count"), [("flux2_klein", 3), ("flux2_klein", 8), ("qwen_image_edit", 3)])
def test_media_of_many_references_are_the_stock_pipelines(
    name: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property
):
    made = load_referring(name, tmp_path)
    assert count <= made.references.most
    monkeypatch.setattr(made.stock, "scheduler", SCHEDULERS["euler"]())
    pictures = PICTURES[:count]
    expected = made.run_stock("put all in one", pictures, SIZE, 3.0, 4)
    drift = float((made.sample("put all in one", pictures, SIZE, 3.0, 4) - expected).abs().max())
    record_property("drift", drift)
    assert drift < 1e-4
    fewer = made.run_stock("put all in one", pictures[:-1], SIZE, 3.0, 4)
    assert float((fewer - expected).abs().max()) > 1e-4
