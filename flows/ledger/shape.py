"""The shape of a run: equal in runs whose stages do equal work on equal numbers of ranks."""

from typing import Any

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.pipelines import directories
from flows.ledger import predicted
from flows.planning import kinds
from flows.planning.base import AnyPlan
from flows.planning.plan import Plan
from flows.planning.run import Run
from flows.sizes import costs

_LAUNCH = {
    "launcher",
    "mode",
    "resident_gb",
    "device",
    "processes",
    "stage_processes",
    "dp_shard_size",
    "cp_size",
    "compile",
    "threads",
}


def shape_of(plan: AnyPlan) -> str:
    """Return a digest of the arithmetic of an iteration, its samples, its scorers, and how processes share them.

    Seeds, learning rates and the number of iterations are no part of it.
    """
    launch = plan.recipe.launch.model_dump(mode="json", include=_LAUNCH, exclude_none=True)
    if (kind := kinds.of(plan)) is not None:
        return digest(kind.shape(plan, launch))[:32]
    assert isinstance(plan, Plan)
    recipe = plan.recipe
    shape = {
        "model": plan.model.adapter,
        "architecture": _architecture(plan),
        "texts": recipe.policy.diffusers.max_prompt_length,
        "media": plan.media.model_dump(mode="json"),
        "algorithm": recipe.train.train_policy.type,
        "passes": predicted.passes(plan),
        "samples": recipe.train.train_batch_per_replica,
        "dtype": recipe.train.param_dtype,
        "rewards": [reward.fn.label for reward in Run(plan, "").scored],
        "launch": launch,
    }
    return digest(shape)[:32]


def _architecture(plan: Plan) -> dict[str, Any]:
    """Return the settings that decide the arithmetic of a forward pass; counting it would need torch."""
    path = costs.base_path(plan.recipe)
    return {name: directories.settings(path, name) for name in ("transformer", "vae")}
