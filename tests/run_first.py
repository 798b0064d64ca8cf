"""Code of a test that every process which it starts runs first, such as a stage in place of one of the project."""

from pathlib import Path

import pytest

ONCE = """
from pathlib import Path

HERE = Path(__file__).parent


def once(name):
    try:
        (HERE / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

"""
"""Beginning of such code: its folder, and a function that is true for the first process that calls it with a name."""


def python_path(folder: Path) -> str:
    """Where processes find the code that they run first, then this project."""
    return f"{folder}:{Path(__file__).parents[1]}"


def run_first(code: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let processes run code in a folder before their own."""
    (folder / "sitecustomize.py").write_text(code, encoding="utf-8")
    patch.setenv("PYTHONPATH", python_path(folder))
