"""Tags of flow runs, by which people and the automation for crashed flow runs find them in Prefect."""

from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.config.vlm.recipe import VlmRecipe

PROJECT = "cosmos-flows"
"""Tag of every flow run of this project, so that other flow runs on a shared server are left alone."""


def tags_of(recipe: Recipe | VlmRecipe, model: str) -> set[str]:
    """Return the tags of a run of this recipe; ``model`` is the name of its model plugin."""
    return {PROJECT, recipe.train.train_policy.type, model}
