"""Tags of flow runs: what people find them by in Prefect, and what the automation for dead ones goes by."""

from cosmos_rl_core.config.recipe import Recipe

PROJECT = "cosmos-flows"
"""On every flow run of this project from its beginning, so that nothing here touches the others of a shared server."""


def tags_of(recipe: Recipe, model: str) -> set[str]:
    """Tags of a run of this recipe; ``model`` is the name of its model plugin."""
    return {PROJECT, recipe.train.train_policy.type, model}
