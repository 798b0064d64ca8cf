"""The tiny pipelines of model plugins as bases of recipes."""

from pathlib import Path
from typing import Any

from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.conformance.models.families import SIZE, fewest, frames_of, length_of, stock_pipeline
from cosmos_rl_core.pipelines import directories


def media_of(folder: str) -> dict[str, Any]:
    """Return the settings ``policy.diffusers`` of a recipe that makes media of the suite's size with a pipeline."""
    settings = {
        "inference_size": [*SIZE],
        "train_frames": frames_of(stock_pipeline(folder)),
        "max_prompt_length": length_of(folder),
    }
    return settings | ({"guardrail": "off"} if directories.spec(folder).guardrail_package else {})


def write(name: str, root: Path) -> dict[str, Any]:
    """Write the tiny pipeline of a model plugin below ``root``, and a second one if only that one takes references.

    Return ``plain`` and ``referring``, the paths of the two pipelines, equal if there is one; ``references``, how many
    a prompt of each needs, for ``referring`` at least one if it takes any; and ``diffusers``: :func:`media_of`.
    """
    plain = referring = str(tiny_pipelines.save(name, root / name))
    if options := tiny_pipelines.with_references(name):
        referring = str(tiny_pipelines.save(name, root / f"{name}-with-references", **options))
    references = {"plain": fewest(plain), "referring": fewest(referring)}
    if directories.spec(referring).references:
        references["referring"] = max(1, references["referring"])
    return {"plain": plain, "referring": referring, "references": references, "diffusers": media_of(plain)}
