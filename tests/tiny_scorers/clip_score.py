"""A tiny CLIP model."""

from pathlib import Path
from typing import Any

from tests.tiny_scorers import _clip


def settings(folder: Path) -> dict[str, Any]:
    return {"model": _clip.save(folder), "batch_size": 3}
