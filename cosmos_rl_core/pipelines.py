"""Diffusers pipeline directories without importing torch: their class, their adapter and their digest."""

import ast
import json
import os
from pathlib import Path

from cosmos_rl_core import models, plugins
from cosmos_rl_core.canonical import files_digest
from cosmos_rl_core.errors import ConfigError

INDEX = "model_index.json"
PACKAGE_PREFIX = "package:"
_SHIPPED = Path(__file__).parent / "tiny" / "pipelines"


def pipeline_class(path: str | Path) -> str:
    """The ``_class_name`` of the pipeline directory ``path``."""
    return read_json(path, INDEX)["_class_name"]


def adapter_name(class_name: str) -> str:
    """The model plugin that has ``class_name`` among its ``PIPELINE_CLASSES``. Reads the sources, imports none."""
    adapters = _adapters()
    if class_name not in adapters:
        known = ", ".join(f"{name} ({adapters[name]})" for name in sorted(adapters))
        raise ConfigError(f"no model plugin for the pipeline class {class_name!r}; known: {known}")
    return adapters[class_name]


def resolve_path(model_name_or_path: str) -> str:
    """Absolute path of a pipeline directory: a local one, or ``package:<name>``, one that ships with this project."""
    if model_name_or_path.startswith(PACKAGE_PREFIX):
        return _shipped_path(model_name_or_path.removeprefix(PACKAGE_PREFIX))
    path = Path(model_name_or_path)
    if not path.is_dir():
        raise ConfigError(
            f"{model_name_or_path!r} is not a directory here; names on a model hub are not downloaded: "
            "pass the local directory of a diffusers pipeline"
        )
    if not (path / INDEX).is_file():
        raise ConfigError(f"{model_name_or_path!r} has no {INDEX}, so it is not a diffusers pipeline directory")
    return str(path.resolve())


def pipeline_files(path: str | Path) -> list[str]:
    """Relative POSIX paths of the directory's files, sorted; hidden files and folders do not count."""
    found = []
    for folder, folders, names in os.walk(path, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        relative = Path(folder).relative_to(path)
        found += [(relative / name).as_posix() for name in names if not name.startswith(".")]
    return sorted(found)


def pipeline_digest(path: str | Path) -> str:
    """Content digest (sha256 hex) of a pipeline directory: its files' relative paths and bytes, and nothing else."""
    return files_digest({name: Path(path) / name for name in pipeline_files(path)})


def read_json(path: str | Path, *names: str) -> dict:
    """A JSON file of the pipeline directory. Raises :class:`ConfigError` if it is absent or not JSON."""
    file = Path(path, *names)
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"the pipeline directory {str(path)!r} has no {'/'.join(names)}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error


def _shipped_path(name: str) -> str:
    shipped = {f"tiny-{index.parent.name}": index.parent for index in _SHIPPED.glob(f"*/{INDEX}")}
    if name not in shipped:
        known = ", ".join(sorted(shipped)) or "none"
        raise ConfigError(f"no pipeline {name!r} ships with this project; known: {known}")
    return str(shipped[name].resolve())


def _adapters() -> dict[str, str]:
    """Plugin names by the pipeline classes that they declare."""
    folder = Path(models.__path__[0])
    return {
        class_name: name for name in plugins.known("models") for class_name in _declared_classes(folder / f"{name}.py")
    }


def _declared_classes(source: Path) -> tuple[str, ...]:
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PIPELINE_CLASSES":
            return ast.literal_eval(node.value)
    raise TypeError(f"{source.name} needs PIPELINE_CLASSES, a tuple of string literals")
