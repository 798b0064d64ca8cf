"""Find and import plugins: ``cosmos_rl_core/<kind>/<name>.py`` is the plugin ``<name>``.

A new plugin needs no other edit. A model is a folder: ``models/<name>/__init__.py`` holds its spec, which imports no
torch, and ``model.py`` the rest. Plugins from outside this package are files that a recipe names
(:mod:`cosmos_rl_core.outside_plugins`) and entry points of installed packages: the group is
``cosmos_rl_flows.<kind>``, the value a module. A name is looked up in this package first, then in the recipe's plugins,
then among entry points.
"""

import difflib
import functools
import importlib
import importlib.metadata
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from cosmos_rl_core.errors import ConfigError, CosmosRLError

MEMBERS = {
    "models": ("SPEC",),
    "algorithms": ("Options", "Algorithm"),
    "rewards": ("Options", "Reward"),
    "datasets": ("Options", "prompts"),
    "captioners": ("Options", "Captioner"),
    "solvers": ("SOLVER", "kernel"),
    "vlms": ("PROCESSORS",),
    "chat_datasets": ("Options", "rows"),
}
"""Names that a plugin must define, by kind."""
KINDS = tuple(MEMBERS)
_LOADED: dict[str, dict[str, ModuleType]] = {kind: {} for kind in KINDS}
"""Plugins from outside that this process has imported, by kind and name."""


def known(kind: str) -> list[str]:
    """Return the sorted names of all plugins of one kind (one of :data:`KINDS`). Import none of them."""
    return sorted({*own(kind), *loaded(kind), *installed(kind)})


@functools.cache
def own(kind: str) -> tuple[str, ...]:
    """Return the names of the plugins that ship with this package."""
    package = importlib.import_module(f"cosmos_rl_core.{kind}")
    names = (module.name for module in pkgutil.iter_modules(package.__path__))
    return tuple(name for name in names if not name.startswith("_"))


def loaded(kind: str) -> dict[str, ModuleType]:
    """Return the plugins from outside that this process has imported, by name."""
    return dict(_LOADED[kind])


@functools.cache
def installed(kind: str) -> dict[str, importlib.metadata.EntryPoint]:
    """Return the entry points of installed packages, by plugin name."""
    found = importlib.metadata.entry_points(group=f"cosmos_rl_flows.{kind}")
    return {entry.name: entry for entry in found}


def load(kind: str, name: str) -> ModuleType:
    """Import a plugin. Raises :class:`ConfigError`, which lists the known names, if ``name`` is unknown."""
    if name in own(kind):
        return importlib.import_module(f"cosmos_rl_core.{kind}.{name}")
    if (module := loaded(kind).get(name)) is not None:
        return module
    if name in installed(kind):
        return _load_installed(kind, name)
    names = known(kind)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ConfigError(f"unknown {kind.removesuffix('s')} {name!r}; {hint}known: {', '.join(names)}")


def load_model(name: str) -> ModuleType:
    """Import the ``model.py`` of a model plugin, and with it torch. Raises like :func:`load`."""
    return importlib.import_module(f"{load('models', name).__name__}.model")


def kinds_of(module: ModuleType) -> list[str]:
    """Return the kinds of plugin whose members a module defines."""
    return [kind for kind, names in MEMBERS.items() if all(hasattr(module, name) for name in names)]


def register(kind: str, name: str, module: ModuleType) -> None:
    """Register a module from outside under a plugin name, for this process."""
    _LOADED[kind][name] = module


def forget() -> None:
    """Forget every registered plugin from outside."""
    for registered in _LOADED.values():
        registered.clear()


@contextmanager
def errors_of(kind: str, name: str) -> Iterator[None]:
    """Turn an error of a plugin from outside into a :class:`ConfigError` that names its file.

    Errors of this project and errors of shipped plugins pass unchanged.
    """
    try:
        yield
    except CosmosRLError:
        raise
    except Exception as error:
        module = loaded(kind).get(name)
        if module is None:
            raise
        where = f"{kind.removesuffix('s')} plugin {module.__file__}"
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error


def _load_installed(kind: str, name: str) -> ModuleType:
    entry = installed(kind)[name]
    where = f"the entry point {name} = {entry.value!r} of {entry.group}"
    try:
        module = entry.load()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
    if not isinstance(module, ModuleType) or kind not in kinds_of(module):
        raise ConfigError(f"{where}: expected a module that defines {' and '.join(MEMBERS[kind])}")
    register(kind, name, module)
    return module
