"""The digests of a Request and of the manifest that answers it."""

from collections.abc import Mapping, Sequence
from typing import Any

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.config.base import Section


def recipe_of(
    stage: str,
    version: int,
    iteration: int | None,
    seed: int,
    config: dict[str, Any],
    plugins: Sequence[Section] = (),
) -> str:
    """Return the digest of everything in a Request but its inputs.

    ``config`` is the identity of the settings. ``plugins`` are the outside plugins that the settings name: slots of
    datasets are shared by runs, whose plans may have pinned other files of the same name.
    """
    what = {"stage": stage, "version": version, "iteration": iteration, "seed": seed, "config": config}
    return digest(what | ({"plugins": [plugin.identity() for plugin in plugins]} if plugins else {}))


def fingerprint_of(recipe: str, inputs: Mapping[str, Sequence[Section]]) -> str:
    """Return the digest of a recipe and of the fingerprints of its inputs."""
    roles = {role: [i.identity() for i in some] for role, some in inputs.items() if some}
    return digest({"recipe": recipe, "inputs": roles})
