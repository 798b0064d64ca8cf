"""A tiny Qwen3-VL that answers with digits, and ends with an even one."""

from pathlib import Path
from typing import Any

from tests.core.vlms import tiny
from tests.core.vlms.cases import QWEN3


def settings(folder: Path) -> dict[str, Any]:
    tiny.save_talker(folder, QWEN3, tokens="0123456789", stops="02468")
    asked = {"rubric": "does it show {prompt}?", "pattern": r"^(\d+)", "lowest": 0, "highest": 1e12}
    return {"model": str(folder), "param_dtype": "float32", "num_frames": 4, "max_new_tokens": 12, **asked}
