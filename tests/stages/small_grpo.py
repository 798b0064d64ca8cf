"""A small run of FlowGRPO on four solver steps, with a plugin from outside."""

from pathlib import Path

from flows.planning.plan import Settings
from tests.pages import ROOT

SMALL = (
    "policy.diffusers.sample.num_steps=4",
    "train.num_iterations=2",
    "train.train_policy.train_on=[0, 1]",
    "train.train_batch_per_replica=8",
    "train.train_policy.batch_size_per_optimize=8",
    "train.train_policy.mini_batch=4",
    "rollout.n_generation=4",
    "rollout.n_generation_mini_batch=4",
)


def settings_with(plugin: Path, *overrides: str) -> Settings:
    """Return the settings of a small run that loads this plugin. Its store is in the folder of the plugin's file."""
    recipe = str(ROOT / "configs" / "tiny" / "grpo.toml")
    store = str(plugin.parent / "store")
    return Settings(recipe, store, run_id="mine", overrides=(f'plugins=["{plugin}"]', *SMALL, *overrides))
