"""Stock pipelines of toy size with random weights and hand-made tokenizers: ``tiny.py`` of each model plugin."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import ConfigError

OPTIONS = "WITH_REFERENCES"
"""Name in ``tiny.py`` of the arguments of ``save`` with which the pipeline takes references, if it needs some."""


def path_of(name: str) -> Path:
    """Return the path of the ``tiny.py`` of the model plugin ``name``."""
    return Path(str(plugins.load("models", name).__file__)).with_name("tiny.py")


def missing(name: str) -> str:
    """Return advice for a model plugin without a tiny pipeline."""
    return (
        f"{path_of(name)} is missing: write a function save(folder, seed=0) that saves a pipeline of the true classes, "
        f"as small as they allow, with random weights; {Path(__file__).parents[2] / 'models/z_image/tiny.py'} is one"
    )


def module_of(name: str) -> ModuleType | None:
    """Return ``tiny.py`` of the model plugin ``name``; None if its folder has none."""
    module = f"{plugins.load('models', name).__name__}.tiny"
    return importlib.import_module(module) if path_of(name).is_file() else None


def with_references(name: str) -> dict[str, Any]:
    """Return the arguments of ``save`` with which the tiny pipeline takes references."""
    return getattr(module_of(name), OPTIONS, {})


def save(name: str, folder: Path, seed: int = 0, **options: Any) -> Path:
    """Write the tiny pipeline of the model plugin ``name`` to ``folder``. ``options`` go to its ``tiny.py``."""
    module = module_of(name)
    if module is None:
        raise ConfigError(missing(name))
    module.save(folder, seed, **options)
    return folder
