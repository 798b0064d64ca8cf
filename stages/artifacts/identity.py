"""The digests that tell what is asked of a stage: the same for a Request and for the manifest that answers it."""

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
    """Digest of what is asked, without the inputs.

    ``config`` is the settings' identity, ``plugins`` are those outside the package that the settings name: slots of
    datasets are shared by runs, whose plans may have pinned other files of the same name.
    """
    what = {"stage": stage, "version": version, "iteration": iteration, "seed": seed, "config": config}
    return digest(what | ({"plugins": [plugin.identity() for plugin in plugins]} if plugins else {}))


def fingerprint_of(recipe: str, inputs: Mapping[str, Sequence[Section]]) -> str:
    """Digest of a recipe and of how the inputs came to be."""
    roles = {role: [i.identity() for i in some] for role, some in inputs.items() if some}
    return digest({"recipe": recipe, "inputs": roles})
