"""Scorers of toy size with random weights of the true architecture: a file for each reward plugin with torch."""

import importlib
from pathlib import Path
from typing import Any


def settings(name: str, folder: Path) -> dict[str, Any]:
    """Write the tiny files of the reward plugin ``name`` to ``folder``; return the settings that name them."""
    return importlib.import_module(f"tests.tiny_scorers.{name}").settings(folder)
