"""Input that no run could use: `plan` names all of it and exits with 64, or with 75 where only a service is away."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_rl_core.config import toml
from cosmos_rl_core.errors import ConfigError, UnavailableError
from cosmos_rl_core.importers.translation import schema_of, translate
from cosmos_rl_core.reward_service import config as service
from flows.planning.plan import Settings, plan_of

Recipe = Callable[..., str]
Main = Callable[..., tuple[object, str, str]]
AWAY = """
from typing import Literal

from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.errors import UnavailableError

KIND = "datasets"


class Options(DatasetOptions):
    name: Literal["away"] = "away"


def prompts(options: Options) -> tuple:
    raise UnavailableError("nobody answers")
"""
EMPTY = AWAY.replace("away", "empty").replace('raise UnavailableError("nobody answers")', "return ()")
DEEP = {
    "arrays": f"a = {'[' * 5000}{']' * 5000}",
    "inline tables": f"a = {'{a = ' * 5000}1{'}' * 5000}",
    "dotted keys": f"{'.'.join('a' * 5000)} = 1",
    "headers": f"[{'.'.join('a' * 5000)}]\nb = 1",
}


def refusal(main: Main, *words: str) -> str:
    code, _, error = main("plan", *words)
    assert code == 64
    assert len(error) < 3000
    return error


@pytest.mark.parametrize("place", ["train.train_policy", "validation"])
def test_a_dataset_without_prompts_is_refused_and_datasets_with_prompts_are_named(
    recipe: Recipe, main: Main, place: str
):
    said = refusal(main, recipe(), "--set", f'{place}.dataset={{name = "snapshot", dataset = "nope"}}')
    assert f"{place}.dataset: the dataset 'snapshot' has media and no prompts; with prompts: hf, local, " in said


@pytest.mark.parametrize("place", ["train.train_policy", "validation"])
def test_a_prepared_dataset_is_no_set_of_a_mixture(recipe: Recipe, main: Main, place: str):
    sets = '[{ dataset = { name = "ocr" } }, { dataset = { name = "snapshot", dataset = "nope" } }]'
    said = refusal(main, recipe(), "--set", f'{place}.dataset={{name = "mixture", sets = {sets}}}')
    assert "set 2 of the mixture: the dataset 'snapshot' has media and no prompts; expected one of: hf, local, " in said
    assert "mixture," not in said


@pytest.mark.parametrize("place", ["train.train_policy", "validation"])
def test_a_dataset_that_gives_no_prompts_is_refused(recipe: Recipe, main: Main, tmp_path: Path, place: str):
    (tmp_path / "empty.py").write_text(EMPTY, encoding="utf-8")
    words = (f'plugins=["{tmp_path}/empty.py"]', f'{place}.dataset={{name = "empty"}}')
    said = refusal(main, recipe(), *(word for change in words for word in ("--set", change)))
    assert f"{place}.dataset: the dataset 'empty' gives no prompts; expected at least one" in said


def test_fewer_prompts_than_an_iteration_draws_are_refused(recipe: Recipe, main: Main, tmp_path: Path):
    (tmp_path / "one.txt").write_text('say "K7"\n', encoding="utf-8")
    words = ("--set", f'train.train_policy.dataset={{name = "prompts", path = "{tmp_path}/one.txt"}}')
    assert (
        "train.train_policy.dataset: one iteration needs 2 prompts, the dataset 'prompts' has 1; add prompts, or lower "
        "train.train_batch_per_replica"
    ) in refusal(main, recipe(), *words)


@pytest.mark.parametrize("kind", DEEP)
def test_tables_nested_without_end_are_refused(main: Main, recipe: Recipe, tmp_path: Path, kind: str):
    file = tmp_path / "deep.toml"
    file.write_text(DEEP[kind], encoding="utf-8")
    for words in ((str(file),), (recipe(), "--cluster", str(file))):
        assert "nested deeper than 32 levels" in refusal(main, *words)
    with pytest.raises(ConfigError, match="nested deeper than 32 levels"):
        service.read(file, {})


def test_values_at_the_limits_are_read():
    depth = toml.MAX_DEPTH - 1
    assert toml.loads(f"a = {'[' * depth}{']' * depth}")["a"]
    assert toml.loads(f"a = {2**63 - 1}\nb = {-(2**63)}\nc = '{'x' * toml.MAX_TEXT}'")["a"] == 2**63 - 1


BOOK = "10000000 characters; expected at most 65536"
BEYOND = {
    "seed of 41 digits": (f"train.seed={'9' * 41}", "whole number of more than 64 bits"),
    "seed of 5000 digits": (f"train.seed={'9' * 5000}", "whole number of more than 64 bits"),
    "seed of 64 bits": (f"validation.seed={2**63}", "whole number of more than 64 bits"),
    "long text": (f'policy.diffusers.sample.negative_prompt="{"a" * 10_000_000}"', BOOK),
    "long word": (f"logging.project_name={'a' * 10_000_000}", BOOK),
    "deep value": (f"train.seed={'[' * 5000}{']' * 5000}", "nested deeper than 32 levels"),
    "deep key": (f"{'a.' * 5000}b=1", "expected section.key=value"),
}


@pytest.mark.parametrize("kind", BEYOND)
def test_values_beyond_any_use_are_refused_and_not_shown_whole(recipe: Recipe, main: Main, kind: str):
    override, expected = BEYOND[kind]
    assert expected in refusal(main, recipe(), "--set", override)


@pytest.mark.parametrize("digits", [41, 5000])
def test_a_seed_of_many_digits_in_a_file_is_refused(recipe: Recipe, main: Main, digits: int):
    said = refusal(main, recipe(("num_iterations = 2", f"num_iterations = 2\nseed = {'9' * digits}")))
    assert "train.seed is a whole number of more than 64 bits; expected at most 2^63 - 1" in said


def test_values_beyond_limits_hide_no_other_mistake(recipe: Recipe, main: Main, tmp_path: Path):
    (tmp_path / "profile.toml").write_text(f"[launch]\nprocesses = {2**63}\n", encoding="utf-8")
    path = recipe(
        ("num_iterations = 2", f"num_iterations = 0\nseed = {'9' * 5000}"),
        ("[rollout]", f"[rollout]\ndeep = {'[' * 50}{']' * 50}"),
        ("optm_lr = 1e-3", f'optm_lr = -1.0\nepsilon = "{"a" * 70_000}"'),
    )
    wrong = (f"validation.seed={2**63}", f"logging.project_name={'a' * 70_000}", "nonsense", "rollout.n_generation=1")
    words = (word for change in wrong for word in ("--set", change))
    said = refusal(main, path, *words, "--cluster", str(tmp_path / "profile.toml"))
    for one in (
        "train.seed is a whole number of more than 64 bits",
        "train.epsilon has 70000 characters",
        "rollout.deep.0.0.0",
        "profile.toml: launch.processes is a whole number of more than 64 bits",
        ": validation.seed is a whole number of more than 64 bits",
        ": logging.project_name has 70000 characters",
        "cannot read override 'nonsense'; expected section.key=value",
        "train.num_iterations: Input should be greater than or equal to 1",
        "train.optm_lr: Input should be greater than",
        "rollout.n_generation: Input should be greater than or equal to 2",
        "rollout.deep: unknown key",
        "train.epsilon: ",
    ):
        assert one in said
    assert "validation.dataset" not in said


def test_a_prompt_as_long_as_a_book_is_refused_and_quoted_by_its_beginning(recipe: Recipe, main: Main, tmp_path: Path):
    (tmp_path / "p.txt").write_text(f'{"a" * 10_000_000}\nsay "K7"\nsay "AB"\n', encoding="utf-8")
    words = ("--set", f'train.train_policy.dataset={{name = "prompts", path = "{tmp_path}/p.txt"}}')
    said = refusal(main, recipe(), *words)
    assert "train.train_policy.dataset: more than 65536 characters in 1 prompt, e.g. p-" in said
    assert "has 10000000, 'aaa" in said
    assert said.rstrip().endswith("'...; shorten or remove it")


def test_a_service_that_does_not_answer_is_no_mistake_and_hides_none(recipe: Recipe, tmp_path: Path):
    (tmp_path / "away.py").write_text(AWAY, encoding="utf-8")
    words = (f'plugins=["{tmp_path}/away.py"]', 'train.train_policy.dataset={name = "away"}')
    with pytest.raises(UnavailableError, match="nobody answers") as alone:
        plan_of(Settings(recipe(), overrides=words))
    assert alone.value.exit_code == 75
    with pytest.raises(ConfigError) as together:
        plan_of(Settings(recipe(), overrides=(*words, "policy.model_name_or_path=nowhere/to-be-found")))
    assert "nobody answers" in str(together.value)
    assert "nowhere/to-be-found" in str(together.value)
    assert "the dataset has 0" not in str(together.value)


@pytest.mark.parametrize("model", ["google/gemma-3-4b-it", "llava-hf/llava-1.5-7b-hf"])
def test_the_kind_of_a_model_that_is_not_known_is_not_guessed(model: str):
    values = {"redis": "12800", "train": {"epoch": 1}, "policy": {"model_name_or_path": model}}
    with pytest.raises(ConfigError) as refused:
        translate(values)
    assert f"supervised fine-tuning of another model ({model})" in str(refused.value)


def test_a_table_called_model_alone_is_no_sign_of_a_world_model(tmp_path: Path):
    theirs = {"model": {"name": "llama3", "flavor": "8B"}, "optimizer": {"name": "AdamW"}, "job": {"dump_folder": "x"}}
    assert schema_of(theirs) is None
    assert schema_of({"model": {"rl": {"enabled": True}}}) == "wfm"
