"""Stock pipelines of toy size with random weights and hand-made tokenizers: ``tiny.py`` of each model plugin."""

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from cosmos_rl_core import plugins


def module_of(name: str) -> ModuleType | None:
    """Return ``tiny.py`` of the model plugin ``name``; None if its folder has none."""
    module = f"{plugins.load('models', name).__name__}.tiny"
    return None if importlib.util.find_spec(module) is None else importlib.import_module(module)


def save(name: str, folder: Path, seed: int = 0, **options: Any) -> Path:
    """Write the tiny pipeline of the model plugin ``name`` to ``folder``. ``options`` are those of its file."""
    module = module_of(name)
    if module is None:
        path = Path(str(plugins.load("models", name).__file__)).with_name("tiny.py")
        raise FileNotFoundError(
            f"the model plugin {name} has no tiny pipeline: write {path} with a function save(folder, seed=0), which "
            "saves a pipeline of the true classes with random weights; cosmos_rl_core/models/z_image/tiny.py is one"
        )
    return module.save(folder, seed, **options)
