"""Plugins from outside the package: found by path, pinned by the digests of their files, imported in every process.

A path names a ``.py`` file, a folder with an ``__init__.py`` (for a model also a ``model.py``), or a folder laid out
like this package: ``rewards/x.py``, ``models/y/``. The members that a file defines determine its kind. The plugin has
the name of the file.
"""

import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from cosmos_rl_core import plugins
from cosmos_rl_core.canonical import from_json, sha256
from cosmos_rl_core.config.base import NOT_IDENTITY, Section
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage.file_digests import Remembered

_PREFIX = "cosmos_rl_outside_"
_PACKAGE = "__init__.py"


class Pin(Section):
    """A plugin from outside, with the digests that its files had when the run was planned."""

    kind: Annotated[str, Field(pattern=f"^({'|'.join(plugins.KINDS)})$")]
    """One of :data:`cosmos_rl_core.plugins.KINDS`."""
    name: str
    path: str = Field(json_schema_extra=NOT_IDENTITY)
    """File or folder of the plugin; for an entry point the file or folder of its package."""
    entry_point: str | None = Field(default=None, json_schema_extra=NOT_IDENTITY)
    """Module of the entry point; None for a plugin that the recipe names by its path."""
    files: dict[str, str]
    """Sha256 of each file, by its path relative to the parent of :attr:`path`."""


def find(paths: Iterable[str]) -> None:
    """Import the plugins at these paths, after forgetting all earlier plugins from outside.

    Raises one :class:`ConfigError` that lists every mistake.
    """
    _forget()
    mistakes: list[str] = []
    for path in paths:
        try:
            for kind, file in _candidates(Path(path)):
                _register(file, kind)
        except ConfigError as error:
            mistakes.append(f"plugins: {error}")
    if mistakes:
        raise ConfigError("\n".join(mistakes))


def pins(model: str) -> tuple[Pin, ...]:
    """Return the imported plugins from outside, without the models of entry points other than ``model``."""
    found = [_pin(kind, name) for kind in plugins.KINDS for name in sorted(plugins.loaded(kind))]
    unused = {pin.name for pin in found if pin.kind == "models" and pin.entry_point} - {model}
    return tuple(pin for pin in found if pin.kind != "models" or pin.name not in unused)


def named_by(settings: object, pinned: Sequence[Pin]) -> tuple[Pin, ...]:
    """Return the pinned plugins that settings name, in sections of any depth."""
    # Most runs pin no plugin. They skip the walk through the settings, which `status` would take for each stage.
    names = set(_names_in(settings)) if pinned else set[tuple[str, str]]()
    return tuple(pin for pin in pinned if (pin.kind, pin.name) in names)


def _names_in(settings: object) -> Iterator[tuple[str, str]]:
    for section in _sections_in(settings):
        if section.plugin is not None:
            kind, field = section.plugin
            yield kind, getattr(section, field)


def _sections_in(settings: object) -> Iterator[Section]:
    """Yield all sections in settings, each before the sections inside it."""
    if isinstance(settings, Section):
        yield settings
        for name in type(settings).model_fields:
            yield from _sections_in(getattr(settings, name))
    elif isinstance(settings, tuple | list | dict):
        for value in settings.values() if isinstance(settings, dict) else settings:
            yield from _sections_in(value)


def check_settings(settings: object) -> None:
    """Raise :class:`ConfigError` if a plugin from outside has options that a plan, which is JSON, cannot hold.

    Sets are refused because they have no order: each process would write another plan.
    """
    mistakes: list[str] = []
    for section in _sections_in(settings):
        if section.plugin is None:
            continue
        kind, field = section.plugin
        if (module := plugins.loaded(kind).get(getattr(section, field))) is None:
            continue
        where = f"{kind.removesuffix('s')} plugin {module.__file__}: Options"
        sets = [name for name in type(section).model_fields if isinstance(getattr(section, name), set | frozenset)]
        mistakes += [f"{where}.{name} is a set, which has no order; use a tuple" for name in sets]
        try:
            section.model_dump(mode="json")
        except ValueError as error:
            mistakes.append(f"{where} cannot be written as JSON: {error}; use plain numbers, strings and tuples")
    if mistakes:
        raise ConfigError("\n  ".join(mistakes))


def use(values: Any, *, verify: bool) -> None:
    """Import the plugins of a plan or a Request, after forgetting all earlier plugins from outside.

    ``values`` are the pins before validation. Raises :class:`ConfigError` if a plugin is missing or, with ``verify``,
    if a file differs from its pin.
    """
    pinned = TypeAdapter(tuple[Pin, ...]).validate_python(values)
    if _imported(pinned) == list(pinned):
        return
    _forget()
    by_path = [pin for pin in pinned if pin.entry_point is None]
    if verify:
        # Checked before the import, so that an edited file is not run.
        found = [pin.model_copy(update={"files": _digests(Path(pin.path))}) for pin in by_path]
        check_same(by_path, found)
    for pin in pinned:
        if pin.entry_point is not None:
            plugins.load(pin.kind, pin.name)
        else:
            _register(Path(pin.path), pin.kind)
    if verify:
        check_same(pinned, _imported(pinned))


def _imported(pinned: Sequence[Pin]) -> list[Pin]:
    """Return new pins, with current digests, of the pinned plugins that this process has imported."""
    return [_pin(pin.kind, pin.name) for pin in pinned if pin.name in plugins.loaded(pin.kind)]


def named_in(data: bytes) -> list[Any]:
    """Return the pins of an encoded Request before validation, which needs the plugins to be imported.

    Returns an empty list if the bytes are not a JSON object; validation reports that.
    """
    with suppress(ValueError, AttributeError):
        return from_json(data).get("plugins", [])
    return []


def check_same(pinned: Sequence[Pin], here: Sequence[Pin]) -> None:
    """Raise :class:`ConfigError`, which names each file that differs, unless ``here`` equals the pinned plugins."""
    places = {(pin.kind, pin.name): Path(pin.path).parent for pin in (*pinned, *here)}
    planned, found = _sha256_by_file(pinned), _sha256_by_file(here)
    mistakes: list[str] = []
    for kind, name, file in sorted({key for key, _ in planned.items() ^ found.items()}):
        was, now = (some.get((kind, name, file), "no file") for some in (planned, found))
        mistakes.append(f"{places[kind, name] / file}: found {now}, planned {was}")
    if mistakes:
        found = "\n  ".join(["the plugins differ from the plan:", *mistakes])
        raise ConfigError(f"{found}\nrestore them, or start another run with another --run-id")


def _sha256_by_file(pins: Iterable[Pin]) -> dict[tuple[str, str, str], str]:
    """Return e.g. ``sha256 0123456789ab`` for each file, by the kind and name of its plugin and the file's path."""
    files = ((pin, name, sha) for pin in pins for name, sha in pin.files.items())
    return {(pin.kind, pin.name, name): f"sha256 {sha[:12]}" for pin, name, sha in files}


def _is_plugin(path: Path) -> bool:
    return path.suffix == ".py" or (path / _PACKAGE).is_file()


def _candidates(path: Path) -> list[tuple[str | None, Path]]:
    """Return the kind, None if the layout does not determine it, and the file or folder of each plugin at a path."""
    if _is_plugin(path):
        return [(None, path)]
    inside: list[tuple[str | None, Path]] = [
        (kind, entry)
        for kind in plugins.KINDS
        for entry in sorted((path / kind).glob("*"))
        if not entry.name.startswith(("_", ".")) and _is_plugin(entry)
    ]
    if not inside:
        known = ", ".join(f"{kind}/" for kind in plugins.KINDS)
        expected = f"a .py file, a folder with {_PACKAGE}, or a folder with some of {known}"
        raise ConfigError(f"{path} holds no plugin; expected {expected}")
    return inside


def _register(path: Path, kind: str | None) -> None:
    """Import and register a file or folder. Raises :class:`ConfigError` if it is no plugin or its name is taken."""
    module, name = _import(path), path.stem
    kinds = plugins.kinds_of(module)
    if len(kinds) != 1 or kind not in (None, *kinds):
        found = " and ".join(kinds) or "no plugin"
        known = plugins.MEMBERS.items()
        wanted = "; or ".join(f"{' and '.join(members)} ({k})" for k, members in known)
        raise ConfigError(f"{path} defines the members of {found}; expected {wanted}")
    (kind,) = kinds
    if kind == "models" and not (path / "model.py").is_file():
        expected = f"a folder with {_PACKAGE}, which defines SPEC, and model.py"
        raise ConfigError(f"{path}: a model is {expected}")
    if name in plugins.own(kind) or name in plugins.loaded(kind):
        raise ConfigError(f"{path}: there is another plugin {name!r} of {kind}; rename one")
    plugins.register(kind, name, module)


def _import(path: Path) -> ModuleType:
    """Import a file anew, even if it was imported before. Raises :class:`ConfigError` if that fails."""
    name = path.stem
    if not name.isidentifier() or name.startswith("_"):
        expected = "letters, digits and '_', a letter first"
        raise ConfigError(f"{path}: {name!r} cannot name a plugin; expected {expected}")
    unique = f"{_PREFIX}{sha256(str(path).encode())[:12]}_{name}"
    file = path / _PACKAGE if (path / _PACKAGE).is_file() else path
    if not file.is_file():
        raise ConfigError(f"no plugin at {path}: there is no such file")
    loader = _Uncached(unique, str(file))
    spec = importlib.util.spec_from_file_location(unique, file, loader=loader)
    assert spec is not None
    module = sys.modules[unique] = importlib.util.module_from_spec(spec)
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[unique]
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and (path.parent / f"{error.name}.py").is_file():
            reason += f"; make a folder {name}/ with {_PACKAGE} of both and write `from . import`"
        elif file == path and "no known parent package" in str(error):
            reason += f"; a file alone is no package: make a folder {name}/ with {_PACKAGE} and the helper in it"
        raise ConfigError(f"{path} cannot be imported: {reason}") from error
    return module


class _Uncached(SourceFileLoader):
    """A loader that always compiles the current file.

    Python's cached byte code is looked up by the file's size and its time in whole seconds, so it can be out of date.
    """

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _forget() -> None:
    """Forget every plugin from outside."""
    plugins.forget()
    # Submodules too: a later import of the same file would find the old ones.
    for name in [name for name in sys.modules if name.startswith(_PREFIX)]:
        del sys.modules[name]


def _pin(kind: Any, name: str) -> Pin:
    """Return a pin, with current digests, of a plugin that this process has imported."""
    module = plugins.loaded(kind)[name]
    path, entry_point = _place(module), None
    if not module.__name__.startswith(_PREFIX):
        path, entry_point = _package_of(module), module.__name__
    return Pin(kind=kind, name=name, path=str(path), entry_point=entry_point, files=_digests(path))


def _place(module: ModuleType) -> Path:
    """Return the folder of a package, or the file of any other module."""
    assert module.__file__ is not None
    file = Path(module.__file__)
    return file.parent if file.name == _PACKAGE else file


def _package_of(module: ModuleType) -> Path:
    """Return the folder of the module's outermost regular package, or the module's file if it is in no package."""
    parts = module.__name__.split(".")
    outer = (sys.modules[".".join(parts[: count + 1])] for count in range(len(parts)))
    return _place(next(package for package in outer if package.__file__ is not None))


def _digests(path: Path) -> dict[str, str]:
    """Return the sha256 of each file, by its path relative to the parent of ``path``.

    Leaves out hidden files and cached byte code.
    """
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    names = {file.relative_to(path.parent): file for file in sorted(files)}
    remembered = Remembered.of_user()
    return {
        name.as_posix(): remembered.sha256(file)
        for name, file in names.items()
        if not any(part.startswith((".", "__pycache__")) for part in name.parts)
    }
