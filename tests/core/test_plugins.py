"""Plugins by their names: which are known, and what an unknown name is told."""

from types import ModuleType

import pytest

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import ArtifactError, ConfigError
from flows.planning.plan import Settings, plan_of
from tests.flows.planning.test_plan_plugins import folder, recipe, refused

__all__ = ["folder", "recipe"]


def test_a_module_is_of_the_kinds_whose_members_it_defines():
    module = ModuleType("both")
    vars(module).update(Options=object, Reward=object, rows=len)
    assert plugins.kinds_of(module) == ["rewards", "chat_datasets"]
    assert plugins.kinds_of(plugins.load("rewards", "jpeg")) == ["rewards"]


def test_only_errors_of_plugins_from_outside_name_the_file():
    module = ModuleType("mine")
    module.__file__ = "/here/mine.py"
    plugins.register("rewards", "mine", module)
    try:
        with (
            pytest.raises(ConfigError, match=r"^reward plugin /here/mine\.py: KeyError: 'x'$"),
            plugins.errors_of("rewards", "mine"),
        ):
            raise KeyError("x")
        with pytest.raises(ArtifactError, match=r"^damaged$"), plugins.errors_of("rewards", "mine"):
            raise ArtifactError("damaged")
        with pytest.raises(KeyError), plugins.errors_of("rewards", "jpeg"):
            raise KeyError("x")
    finally:
        plugins.forget()
    assert "mine" not in plugins.known("rewards")


def test_an_unknown_name_lists_plugins_from_outside_too(recipe: str):
    said = refused(recipe, "train.train_policy.type=nft3", 'rewards=[{ fn = { name = "brigth" } }]')
    assert "unknown algorithm 'nft3'; did you mean 'nft" in said
    assert "known: ddrl, dpo, grpo, nft, nft2, rft, sft" in said
    known = ", ".join(sorted(["bright", *plugins.own("rewards")]))
    assert f"unknown reward 'brigth'; did you mean 'bright'? known: {known}" in said


def test_plugins_of_one_recipe_are_not_known_to_the_next(recipe: str):
    plan_of(Settings(recipe))
    plan_of(Settings("configs/tiny/nft.toml"))
    assert [plugins.loaded(kind) for kind in plugins.KINDS] == [{}] * len(plugins.KINDS)
    assert "unknown algorithm 'nft2'; did you mean 'nft'?" in refused(recipe, "plugins=[]")
