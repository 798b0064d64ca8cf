"""Directories of diffusers pipelines: their class, model plugin, digest, and the packages they need. Without torch."""

import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import huggingface_hub

from cosmos_rl_core import plugins, shipped
from cosmos_rl_core.canonical import digest, from_json
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.pipelines.spec import ModelSpec
from cosmos_rl_core.storage.file_digests import files_digest

INDEX = "model_index.json"
TRANSFORMER = "transformer"
WEIGHTS = "diffusion_pytorch_model.safetensors"
"""Name of a component's weights in one file. With ``.index.json`` appended: the list of several files."""
ORIGIN = "imported_from.json"
"""File of a converted pipeline: name and sha256 of the file with the weights of cosmos's own code."""
REVISIONS = {f"nvidia/Cosmos-Predict2.5-{size}": "diffusers/base/post-trained" for size in ("2B", "14B")}
"""Revisions that hold the pipeline in repositories of the Hugging Face hub whose main branch holds other weights."""


def pipeline_class(path: str | Path) -> str:
    """Return the ``_class_name`` of the pipeline directory ``path``."""
    return read_json(path, INDEX)["_class_name"]


def adapter_name(path: str | Path) -> str:
    """Return the name of the model plugin that reads the pipeline directory ``path``. Raises like :func:`claimant`."""
    return claimant(pipeline_class(path))[0]


def spec(path: str | Path) -> ModelSpec:
    """Return the spec of the model plugin that reads the pipeline directory ``path``. Raises like :func:`claimant`.

    It has no ``references`` if this pipeline takes none.
    """
    found = claimant(pipeline_class(path))[1]
    if found.references is None or found.references.when(read_json(path, INDEX)):
        return found
    return replace(found, references=None)


def claimant(class_name: str) -> tuple[str, ModelSpec]:
    """Return name and spec of the model plugin that claims a pipeline class.

    A plugin that the recipe names replaces a plugin that ships with this package and claims the same class. Plugins of
    installed packages are imported only if no other plugin claims it. Raises :class:`ConfigError` if no plugin claims
    it, listing the known classes, or if two plugins of one origin do.
    """
    specs: dict[str, ModelSpec] = {}
    installed = plugins.installed("models")
    named = [name for name in plugins.loaded("models") if name not in installed]
    for names in (named, plugins.own("models"), installed):
        specs |= {name: _spec_of(name) for name in names}
        claims = [name for name, its_spec in specs.items() if class_name in its_spec.pipeline_classes]
        if len(claims) > 1:
            raise ConfigError(f"the model plugins {', '.join(sorted(claims))} all claim {class_name!r}; leave one out")
        if claims:
            return claims[0], specs[claims[0]]
    known = sorted(f"{claimed} ({name})" for name, its_spec in specs.items() for claimed in its_spec.pipeline_classes)
    raise ConfigError(f"no model plugin for the pipeline class {class_name!r}; known: {', '.join(known)}")


def replaced(path: str | Path) -> str | None:
    """Return the shipped model plugin that another one replaces for the pipeline directory ``path``; None if none."""
    name = pipeline_class(path)
    shipped = (own for own in plugins.own("models") if name in _spec_of(own).pipeline_classes)
    return next((own for own in shipped if own != adapter_name(path)), None)


def specs() -> Iterator[ModelSpec]:
    """Yield the spec of every model plugin that ships with this package or was loaded."""
    for name in (*plugins.own("models"), *plugins.loaded("models")):
        yield _spec_of(name)


def _spec_of(plugin: str) -> ModelSpec:
    module = plugins.load("models", plugin)
    if not isinstance(module.SPEC, ModelSpec):
        raise ConfigError(f"{module.__file__}: SPEC must be a ModelSpec, found {type(module.SPEC).__name__}")
    return module.SPEC


def scheduler(path: str | Path) -> tuple[str, dict[str, Any]]:
    """Return the class of the pipeline's scheduler and the settings in its file, without the class's defaults.

    The class is the index's, like in diffusers, whatever class wrote the settings.
    """
    return read_json(path, INDEX)["scheduler"][1], read_json(path, "scheduler", "scheduler_config.json")


def resolve_path(model_name_or_path: str) -> str:
    """Return the absolute path of a pipeline directory.

    ``model_name_or_path`` is a local directory; or ``package:<name>``, a pipeline that ships with this project; or
    ``<owner>/<name>[@<revision>]``, a repository of the Hugging Face hub in the local cache. The revision defaults to
    main, or to one of :data:`REVISIONS`; the directory holds the commit that the revision had when it was downloaded.
    Raises :class:`ConfigError` if there is no such pipeline.
    """
    path = shipped.path_of(model_name_or_path, "pipeline")
    if not path.is_dir() and path.suffix != ".pt":
        path = cached_path(model_name_or_path, "a diffusers pipeline")
    if native := _native_weights(path):
        raise ConfigError(
            f"{model_name_or_path!r} has weights of cosmos's own code ({native.name}), expected the directory of a "
            f"diffusers pipeline; make one: cosmos-flows import-weights {native} BASE DIRECTORY, where BASE is the "
            "diffusers pipeline of the same model; or convert everything with diffusers' own script: python "
            f"scripts/convert_cosmos_to_diffusers.py --transformer_ckpt_path {native} --transformer_type "
            "Cosmos-2.5-Predict-Base-2B --vae_type wan2.1 --output_path DIRECTORY --save_pipeline"
        )
    if not (path / INDEX).is_file():
        raise ConfigError(f"{model_name_or_path!r} has no {INDEX}, so it is not a diffusers pipeline directory")
    return str(path.resolve())


def _native_weights(path: Path) -> Path | None:
    """Return the ``.pt`` file at ``path``, or one in a folder that is no pipeline, such as a snapshot from the hub."""
    if path.suffix == ".pt":
        return path
    return None if (path / INDEX).is_file() else min(path.rglob("*.pt"), default=None)


def pipeline_files(path: str | Path) -> list[str]:
    """Return relative POSIX paths of the directory's files, sorted, without hidden files and folders."""
    found = []
    for folder, folders, names in os.walk(path, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        relative = Path(folder).relative_to(path)
        found += [(relative / name).as_posix() for name in names if not name.startswith(".")]
    return sorted(found)


def pipeline_digest(path: str | Path) -> str:
    """Return the content digest (sha256 hex) of a pipeline directory: of relative paths and bytes of its files."""
    return files_digest({name: Path(path) / name for name in pipeline_files(path)})


def stamp(path: str | Path) -> str:
    """Return a digest of names, sizes and times of the pipeline's files, which changes when a file is replaced."""
    stats = ((name, Path(path, name).stat()) for name in pipeline_files(path))
    return digest([[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats])


def transformer_files(path: str | Path) -> list[str]:
    """Return the names of the files with the transformer's weights, as the index names them if there is one.

    Variants, such as half precision, are not among them. Raises :class:`ConfigError` if there are no safetensors.
    """
    folder = Path(path, TRANSFORMER)
    if (folder / f"{WEIGHTS}.index.json").is_file():
        return sorted(set(read_json(path, TRANSFORMER, f"{WEIGHTS}.index.json")["weight_map"].values()))
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    raise ConfigError(f"{str(folder)!r} has no {WEIGHTS}; weights in other formats are not read")


def read_json(path: str | Path, *names: str) -> dict[str, Any]:
    """Return the object in a JSON file of the pipeline directory. Raises :class:`ConfigError` if it cannot be read."""
    file = Path(path, *names)
    try:
        return from_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"the pipeline directory {str(path)!r} has no {'/'.join(names)}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error


def settings(path: str | Path, component: str) -> dict[str, Any]:
    """Return the settings of a component of the pipeline directory.

    Settings that its ``config.json`` leaves out have the class's defaults, if the model's spec states them.
    """
    own = read_json(path, component, "config.json")
    return {**spec(path).defaults(own.get("_class_name", "")), **own}


def has_guardrail(path: str | Path, setting: Literal["required", "off"] | None) -> bool:
    """Return whether prompts and media pass a guardrail of the model, given ``policy.diffusers.guardrail``."""
    return spec(path).guardrail_package is not None and setting != "off"


def check_guardrail(path: str | Path, setting: Literal["required", "off"] | None) -> None:
    """Raise :class:`ConfigError` if ``policy.diffusers.guardrail`` needs a package that is not installed.

    A model with a guardrail needs it unless the setting is ``off``; a model without one allows no setting.
    """
    package = spec(path).guardrail_package
    if package is None and setting is not None:
        raise ConfigError(
            f'policy.diffusers.guardrail = "{setting}": {pipeline_class(path)} has no guardrail; leave the setting out'
        )
    if package is not None and setting != "off":
        given = 'guardrail = "required"' if setting else 'guardrail, "required" unless it is set,'
        check_installed(package, f"policy.diffusers.{given}", 'or set it to "off"')


def check_takes_instruction(path: str | Path) -> None:
    """Raise :class:`ConfigError` if ``policy.diffusers.complex_human_instruction`` would change nothing."""
    if not spec(path).takes_instruction:
        raise ConfigError(
            f"policy.diffusers.complex_human_instruction: {pipeline_class(path)} puts no instruction before prompts; "
            "leave it out"
        )


def check_runs(path: str | Path) -> None:
    """Raise :class:`ConfigError` if the transformer needs a package that is not installed."""
    if settings(path, "transformer").get("concat_padding_mask"):
        check_installed("torchvision", "this transformer, which scales its padding mask,")


def check_installed(package: str, what: str, otherwise: str = "") -> None:
    """Raise :class:`ConfigError` with the command to install ``package``, which ``what`` needs, if it is missing."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{what} needs the package {package}: pip install {package} {otherwise}".rstrip())


def download_command(name: str) -> str | None:
    """Return the command that downloads a repository of the Hugging Face hub; None for a local pipeline."""
    if Path(name).is_dir() or (hub_name := _hub_name(name)) is None:
        return None
    repository, revision = hub_name
    return f"hf download {repository}{f' --revision {revision}' if revision else ''}"


def _hub_name(name: str) -> tuple[str, str | None] | None:
    """Return repository and revision of ``owner/name[@revision]``; None for anything else."""
    if (found := _HUB_NAME.fullmatch(name)) is None:
        return None
    return found[1], found[2] or REVISIONS.get(found[1])


def cached_path(name: str, what: str) -> Path:
    """Return the snapshot of a hub repository in the local cache; nothing is downloaded.

    Raises :class:`ConfigError`, which says that ``what`` is expected, if there is none.
    """
    if (hub_name := _hub_name(name)) is None:
        raise ConfigError(
            f"{name!r} is not a directory here: pass the local directory of {what}, or a name on the Hugging Face "
            "hub, owner/name or owner/name@revision"
        )
    repository, revision = hub_name
    try:
        return Path(huggingface_hub.snapshot_download(repository, revision=revision, local_files_only=True))
    except (huggingface_hub.errors.LocalEntryNotFoundError, huggingface_hub.errors.HFValidationError) as error:
        raise ConfigError(
            f"{name!r} is not a directory here, nor in the local cache of the Hugging Face hub, and is not downloaded "
            f"by itself: {download_command(name)}"
        ) from error


_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
"""Owner and name of a repository, and its revision."""
