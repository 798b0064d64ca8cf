"""Plugins are files: ``cosmos_rl_core/<kind>/<name>.py`` is known as ``<name>``. To add one, nothing else is edited.

A model is a folder: ``models/<name>/__init__.py`` holds its spec, which imports no torch, and ``model.py`` the rest.
"""

import difflib
import importlib
import pkgutil
from types import ModuleType

from cosmos_rl_core.errors import ConfigError

KINDS = ("models", "algorithms", "rewards", "datasets")


def known(kind: str) -> list[str]:
    """Names of the plugins of one kind (one of :data:`KINDS`), sorted. Imports none of them."""
    package = importlib.import_module(f"cosmos_rl_core.{kind}")
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))


def load(kind: str, name: str) -> ModuleType:
    """Import one plugin module. Raises :class:`ConfigError`, listing the known names, if there is none of that name."""
    names = known(kind)
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"unknown {kind.removesuffix('s')} {name!r}; {hint}known: {', '.join(names)}")
    return importlib.import_module(f"cosmos_rl_core.{kind}.{name}")


def load_model(name: str) -> ModuleType:
    """Import the ``model.py`` of a model plugin, and torch with it. Raises as :func:`load`."""
    return importlib.import_module(f"{load('models', name).__name__}.model")
