"""A tiny CLIP model and a perceptron on its embeddings."""

from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from cosmos_rl_core.rewards.aesthetic import HEAD
from tests.tiny_scorers import _clip

WIDTHS = {0: (16, 8), 2: (8, 6), 4: (6, 4), 6: (4, 3), 7: (3, 1)}


def perceptron() -> dict[str, np.ndarray]:
    rng, found = np.random.default_rng(0), {}
    for layer, (given, made) in WIDTHS.items():
        found[f"layers.{layer}.weight"] = rng.normal(size=(made, given)).astype(np.float32)
        found[f"layers.{layer}.bias"] = rng.normal(size=made).astype(np.float32)
    return found


def settings(folder: Path) -> dict[str, Any]:
    (folder / "head").mkdir()
    safetensors.numpy.save_file(perceptron(), folder / "head" / HEAD)
    return {"model": _clip.save(folder / "model"), "head": str(folder / "head"), "batch_size": 2}
