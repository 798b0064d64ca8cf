"""Footprints of passes. A separate process counts them, because counting needs torch; answers are kept on disk."""

import json
import os
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from pydantic import ValidationError

from cosmos_rl_core import outside_plugins
from cosmos_rl_core.canonical import digest
from cosmos_rl_core.footprint.passes import Footprint, Pass
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.storage import cache
from cosmos_rl_core.weights import counting

COUNTER = "cosmos_rl_core.footprint.counter"
VERSION = 2
"""Version, raised with every change of the numbers for equal passes, so that older answers on disk are not read."""
PACKAGES = ("torch", "diffusers", "peft", "accelerate")


def footprints(pipeline: str, passes: Sequence[Pass]) -> list[Footprint]:
    """Return the footprint of each pass.

    Earlier answers for the same configs, packages and plugins are read from the user's cache directory; one process
    counts all other passes. Raises :class:`ConfigError` if the pipeline cannot be built from its configs.
    """
    keys = [_key(pipeline, one) for one in passes]
    found = {key: kept for key in keys if (kept := _kept(key)) is not None}
    missing = {key: one for key, one in zip(keys, passes, strict=True) if key not in found}
    answers = dict(zip(missing, _counted(pipeline, [*missing.values()]), strict=True))
    for key, answer in answers.items():
        _keep(key, answer)
    return [(found | answers)[key] for key in keys]


def _counted(pipeline: str, passes: Sequence[Pass]) -> list[Footprint]:
    if not passes:
        return []
    answers = counting.ask(COUNTER, "footprints", pipeline, [one.model_dump(mode="json") for one in passes])
    return [Footprint.model_validate(answer) for answer in answers]


def _key(pipeline: str, one: Pass) -> str:
    """Return a digest of everything that decides the answer."""
    adapter = directories.adapter_name(pipeline)
    parts = [name for name in ("transformer", "vae") if Path(pipeline, name, "config.json").is_file()]
    decided_by = {
        "version": VERSION,
        "pass": one.model_dump(mode="json"),
        "pipeline": directories.pipeline_class(pipeline),
        "configs": {name: directories.read_json(pipeline, name, "config.json") for name in parts},
        "packages": {name: version(name) for name in PACKAGES},
        "plugins": [pin.model_dump(mode="json") for pin in outside_plugins.pins(adapter)],
    }
    return digest(decided_by)


def _place(key: str) -> Path | None:
    """Return the file of an answer; None without a cache directory."""
    folder = cache.of_user()
    return None if folder is None else folder / "footprints" / f"{key}.json"


def _kept(key: str) -> Footprint | None:
    """Return a kept answer; None if there is none or it cannot be read, so that it is counted again."""
    place = _place(key)
    try:
        return None if place is None else Footprint.model_validate_json(place.read_bytes())
    except (OSError, ValidationError):
        return None


def _keep(key: str, answer: Footprint) -> None:
    """Write an answer in one atomic step. If the directory cannot be written to, the next plan counts it again."""
    if (place := _place(key)) is None:
        return
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=place.parent, delete=False, encoding="utf-8") as file:
            json.dump(answer.model_dump(mode="json"), file)
        os.replace(file.name, place)
    except OSError:
        return
