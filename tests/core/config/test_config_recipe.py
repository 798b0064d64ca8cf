"""Recipes: what identifies them."""

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.config.recipe import Recipe

VALUES = {
    "policy": {"model_name_or_path": "package:tiny-sd3"},
    "train": {
        "num_iterations": 2,
        "train_batch_per_replica": 4,
        "optm_weight_decay": 0,
        "train_policy": {"type": "nft", "dataset": {"name": "ocr"}},
    },
    "rollout": {"n_generation": 2},
    "rewards": [{"fn": {"name": "ocr"}}],
}


def test_how_far_and_how_a_run_is_launched_are_no_part_of_its_recipe():
    recipe = Recipe.model_validate(VALUES)
    longer = Recipe.model_validate(VALUES | {"train": VALUES["train"] | {"num_iterations": 9}})
    wider = Recipe.model_validate(VALUES | {"launch": {"processes": 8, "threads": 4}})
    seeded = Recipe.model_validate(VALUES | {"train": VALUES["train"] | {"seed": 1}})
    assert digest(recipe.identity()) == digest(longer.identity()) == digest(wider.identity())
    assert digest(recipe.identity()) != digest(seeded.identity())
    assert recipe.identity()["train"]["optm_weight_decay"] == 0.0
