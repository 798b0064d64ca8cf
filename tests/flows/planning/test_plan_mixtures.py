"""Mixtures of prompt sets: what share of the iterations' prompts each set has, and what no mixture is."""

import tomllib
from pathlib import Path

import jsonschema
import pytest

from cosmos_rl_core.datasets._base import prompt_id
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.recipes.schema import recipe_schema
from flows.planning.plan import Settings, plan_of, read_plan
from tests.hand_made import planned

TWICE = """
from typing import Literal

from cosmos_rl_core.interfaces.datasets import DatasetOptions, Prompt


class Options(DatasetOptions):
    name: Literal["twice"] = "twice"


def prompts(options):
    return [Prompt(id="same", text=f'a sign that says "{word}"') for word in ("AB", "CD")]
"""
"""A dataset that gives two prompts one id."""


@pytest.fixture
def mixed(recipe, tmp_path: Path):
    """A recipe of eight prompts an iteration; called with the weights of files of words, it is rewritten."""

    def write(*sets: tuple[float, str]) -> str:
        tables = []
        for number, (weight, words) in enumerate(sets):
            (tmp_path / f"{number}.txt").write_text(
                "".join(f'a sign that says "{word}"\n' for word in words.split()), encoding="utf-8"
            )
            file = tmp_path / f"{number}.txt"
            tables.append(f'{{ weight = {weight}, dataset = {{ name = "prompts", path = "{file}" }} }}')
        text = f'name = "mixture"\nsets = [{", ".join(tables)}]'
        old = f'name = "ocr"\nlocal_dir = "{tmp_path / "words"}"'
        return recipe((old, text), ("train_batch_per_replica = 8", "train_batch_per_replica = 32"))

    return write


def many(letter: str, count: int) -> str:
    return " ".join(f"{letter}{number}" for number in range(count))


def test_the_plan_pins_the_sets_and_ids_depend_on_texts_alone(mixed, tmp_path: Path):
    path = mixed((3, f"{many('A', 9)}"), (1, f"A0 {many('B', 4)}"))
    run = planned(path, tmp_path, run_id="mixed")
    texts = [f'a sign that says "{word}"' for word in f"{many('A', 9)} {many('B', 4)}".split()]
    assert [prompt.id for prompt in run.plan.prompts] == [prompt_id(text) for text in texts]
    # A0 belongs to the first set.
    assert [(share.weight, share.num_prompts) for share in run.plan.shares] == [(3, 9), (1, 4)]
    assert read_plan(str(tmp_path / "store"), "mixed").shares == run.plan.shares
    for k in range(6):
        drawn = [prompt.text for prompt in run.plan.prompts_of(k)]
        assert len(set(drawn)) == 8
        assert sum('"A' in text for text in drawn) == 6
    longer = planned(path, tmp_path, run_id="longer", iterations=50)
    assert [run.plan.prompts_of(k) for k in range(9)] == [longer.plan.prompts_of(k) for k in range(9)]
    mixed((2, f"{many('A', 9)}"), (1, f"A0 {many('B', 4)}"))
    with pytest.raises(ConfigError, match=r"shares: .*planned otherwise|planned otherwise(.|\n)*shares"):
        planned(path, tmp_path, run_id="mixed")


def test_sets_that_are_too_small_and_sets_without_prompts_of_their_own_are_named(mixed, tmp_path: Path):
    with pytest.raises(
        ConfigError, match="needs up to 4 prompts of set 2 of the mixture, which has 3; lower its weight"
    ):
        plan_of(Settings(mixed((1, many("A", 9)), (1, many("B", 3))), str(tmp_path / "store")))
    with pytest.raises(ConfigError, match=r"set 2 of the mixture \(prompts\) has no prompt that earlier sets lack"):
        plan_of(Settings(mixed((1, many("A", 9)), (1, "A1 A2")), str(tmp_path / "store")))
    path = mixed((1, many("A", 9)), (1, many("B", 9)))
    for number in (0, 1):
        (tmp_path / f"{number}.txt").unlink()
    with pytest.raises(ConfigError, match=r"no prompt file at .*0\.txt(.|\n)*no prompt file at .*1\.txt"):
        plan_of(Settings(path, str(tmp_path / "store")))


def test_prompts_of_plugins_from_outside_are_checked_in_a_mixture_too(recipe, tmp_path: Path):
    (tmp_path / "twice.py").write_text(TWICE, encoding="utf-8")
    sets = 'sets = [{ dataset = { name = "twice" } }, { dataset = { name = "ocr" } }]'
    path = recipe((f'name = "ocr"\nlocal_dir = "{tmp_path / "words"}"', f'name = "mixture"\n{sets}'))
    changes = [f'plugins=["{tmp_path / "twice.py"}"]']
    with pytest.raises(ConfigError, match=r"twice\.py: ValueError: prompts\(\) gives 2 prompts the id 'same'"):
        plan_of(Settings(path, str(tmp_path / "store"), overrides=changes))


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        ("[]", "at least 1 item"),
        ('[{ weight = 0.0, dataset = { name = "ocr" } }]', "greater than 0"),
        ('[{ weigth = 1.0, dataset = { name = "ocr" } }]', "did you mean 'weight'"),
        ('[{ dataset = { name = "orc" } }]', "did you mean 'ocr'"),
        ('[{ dataset = { name = "mixture", sets = [{ dataset = { name = "ocr" } }] } }]', "a mixture in a mixture"),
    ],
)
def test_settings_that_are_no_mixture_are_named(recipe, tmp_path: Path, sets: str, says: str):
    old = f'name = "ocr"\nlocal_dir = "{tmp_path / "words"}"'
    with pytest.raises(ConfigError, match=says):
        plan_of(Settings(recipe((old, f'name = "mixture"\nsets = {sets}')), str(tmp_path / "store")))


def test_the_schema_describes_mixtures_of_any_dataset(mixed):
    validator = jsonschema.Draft7Validator(recipe_schema())
    values = tomllib.loads(Path(mixed((3, "A"), (1, "B"))).read_text(encoding="utf-8"))
    assert [*validator.iter_errors(values)] == []
    values["train"]["train_policy"]["dataset"]["sets"][0]["dataset"]["pth"] = "x"
    assert [*validator.iter_errors(values)]
