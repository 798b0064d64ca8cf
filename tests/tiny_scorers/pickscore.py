"""A tiny CLIP model whose inputs another folder makes."""

from pathlib import Path
from typing import Any

from tests.tiny_scorers import _clip


def settings(folder: Path) -> dict[str, Any]:
    return {"model": _clip.save(folder / "model"), "processor": _clip.save(folder / "inputs"), "batch_size": 4}
