"""A tiny CLIP model with the heads and the activation of ViT-H-14."""

from pathlib import Path
from typing import Any

from tests.tiny_scorers import _clip


def settings(folder: Path) -> dict[str, Any]:
    sizes = {"num_attention_heads": 16, "hidden_act": "gelu"}
    return {"model": _clip.save(folder / "model", **sizes), "processor": _clip.save(folder / "inputs"), "batch_size": 3}
