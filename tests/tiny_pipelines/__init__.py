"""Stock pipelines of toy size with random weights and hand-made tokenizers: a file for each model plugin."""

import importlib
from pathlib import Path
from typing import Any


def save(name: str, folder: Path, seed: int = 0, **options: Any) -> Path:
    """Write the tiny pipeline of the model plugin ``name`` to ``folder``. ``options`` are those of its file."""
    return importlib.import_module(f"tests.tiny_pipelines.{name}").save(folder, seed, **options)
