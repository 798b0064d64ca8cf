"""A tiny Qwen2.5-VL, and a system prompt of our own."""

from pathlib import Path
from typing import Any

from tests.core.vlms import tiny
from tests.core.vlms.cases import QWEN25


def settings(folder: Path) -> dict[str, Any]:
    tiny.save_model(folder, QWEN25)
    (folder / "system_prompt.txt").write_text("Is there anything odd? Yes or No.", encoding="utf-8")
    return {"model": str(folder), "param_dtype": "float32"}
