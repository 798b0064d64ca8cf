"""cosmos-rl's validation of supervised training: when, from which prompts, and how its samples are made."""

import json
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core import plugins
from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.config.train import SupervisedOptions
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers.translation import translate, translated
from cosmos_rl_core.recipes.reading import check
from tests.core.importers.cosmos_rl.test_recipe_rows import SFT, entry, read

SAMPLE = "policy.diffusers.sample"


def checked(values: dict[str, Any]) -> Recipe:
    """The translated recipe, with the length that a folder would give it."""
    ours = translated(values, "x.toml")
    ours["train"]["num_iterations"] = 1
    return check(ours, "x.toml")


def supervised(recipe: Recipe) -> SupervisedOptions:
    assert isinstance(recipe.train.train_policy, SupervisedOptions)
    return recipe.train.train_policy


@pytest.mark.parametrize(
    ("save", "freq", "steps", "iterations"),
    [(30, 10, 10, 1), (10, 10, 10, 1), (30, 60, 30, 2), (20, 7, 20, 1), (20, 50, 20, 2), (20, 200, 20, 10)],
)
def test_iterations_end_where_cosmos_rl_saves_or_validates(save: int, freq: int, steps: int, iterations: int):
    values = read(SFT, train__ckpt__save_freq=save, validation__freq=freq)
    recipe = checked(values)
    assert recipe.validation is not None
    assert (supervised(recipe).steps_per_iteration, recipe.validation.freq) == (steps, iterations)
    why = entry(values, "validation.freq").why
    assert why == f"every {steps * iterations} steps" + (f" instead of {freq}" if steps * iterations != freq else "")


def test_the_default_frequency_is_cosmos_rls_in_whatever_order_the_keys_are():
    values = read(SFT, validation__freq=None)
    assert checked(values).validation == checked(read(SFT, validation__freq=20)).validation
    values["validation"] = dict(reversed(values["validation"].items()))
    recipe = checked(values)
    assert recipe.validation is not None
    assert recipe.validation.freq == 1


def test_a_disabled_validation_changes_nothing():
    values = read(SFT, validation__enable=False)
    recipe = checked(values)
    assert recipe.validation is None
    assert supervised(recipe).steps_per_iteration == 30
    assert "sample" not in translate(values).values["policy"]["diffusers"]


def test_samples_are_made_as_cosmos_rl_makes_them():
    values = read(SFT, policy__diffusers__sample__num_steps=7, policy__diffusers__sample__guidance_scale=3.0)
    recipe = checked(values)
    assert recipe.evaluates
    sample, validation = recipe.policy.diffusers.sample, recipe.validation
    assert validation is not None
    assert (sample.eval_num_steps, sample.guidance_scale, validation.n_generation) == (7, 4.5, 1)
    assert "whatever the file sets" in entry(values, f"{SAMPLE}.guidance_scale").why
    cosmos = read(SFT, policy__model_name_or_path="nvidia/Cosmos-Predict2.5-2B")
    assert checked(cosmos).policy.diffusers.sample.guidance_scale == 5.5


def test_prompts_of_a_validation_come_from_the_json_list(tmp_path: Path):
    file = tmp_path / "validation.json"
    file.write_text(json.dumps([{"prompt": "a fox"}, {"prompt": " a hen ", "seed": 3}]), encoding="utf-8")
    validation = checked(read(SFT, validation__dataset__local_dir=str(file))).validation
    assert validation is not None
    assert validation.dataset is not None
    plugin: Any = plugins.load("datasets", validation.dataset.name)
    found = [(prompt.text, prompt.metadata) for prompt in plugin.prompts(validation.dataset)]
    assert found == [("a fox", {}), ("a hen", {"seed": 3})]
    file.write_text('[{"prompt": 1}, "a fox", {"text": "a hen"}]', encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        plugin.prompts(validation.dataset)
    assert [str(caught.value).count(f"entry {number}:") for number in (1, 2, 3)] == [1, 1, 1]


@pytest.mark.parametrize("local_dir", [None, ""])
def test_without_a_list_the_prompts_are_left_to_the_user(local_dir: str | None):
    assert entry(read(SFT, validation__dataset__local_dir=local_dir), "validation.dataset.local_dir").verdict == "open"


@pytest.mark.parametrize("freq", [0, -1, 1.5, "often", True])
def test_a_frequency_that_is_no_number_of_steps_is_refused(freq: Any):
    with pytest.raises(ConfigError, match=r"validation\.freq"):
        translated(read(SFT, validation__freq=freq), "x.toml")
