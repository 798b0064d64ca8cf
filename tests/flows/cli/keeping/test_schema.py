"""The JSON Schema of recipes: it accepts every recipe that there is, and refuses what is none."""

import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from cosmos_rl_core import plugins
from cosmos_rl_core.outside_plugins import find
from docs._ext import recipe_fields
from flows.cli import app as cli
from tests.pages import ROOT, write_examples
from tests.test_rules import SHIPPED_RECIPES

OTHERS = [path for folder in ("docs/studies", "tests/e2e") for path in (ROOT / folder).rglob("*.toml")]
RECIPES = [*SHIPPED_RECIPES, *OTHERS]


def schema_of(*words: str) -> dict[str, Any]:
    ended = CliRunner().invoke(cli.app, ["schema", *words])
    assert ended.exit_code == 0, ended.output
    return json.loads(ended.stdout)


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return schema_of()


def mistakes(schema: dict[str, Any], recipe: dict[str, Any]) -> list[str]:
    return [error.json_path for error in jsonschema.Draft7Validator(schema).iter_errors(recipe)]


@pytest.mark.parametrize("path", sorted(RECIPES), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_recipe_is_valid(schema: dict[str, Any], path: Path):
    assert mistakes(schema, tomllib.loads(path.read_text(encoding="utf-8"))) == []


def test_the_schema_says_what_each_field_means(schema: dict[str, Any]):
    jsonschema.Draft7Validator.check_schema(schema)
    tables = [schema, *(table for table in schema["$defs"].values() if "properties" in table)]
    names = {"type", "name", "policy", "train", "rollout", "rewards", "validation", "launch", "logging"}
    bare = [name for table in tables for name, field in table["properties"].items() if "description" not in field]
    assert {*bare} <= names
    assert len(tables) > 20


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("policy", "lora", "r"), 0),
        (("policy", "lora", "rank"), 8),
        (("policy", "diffusers", "inference_size"), [32]),
        (("train", "optm_betas"), "0.9"),
        (("train", "train_policy", "type"), "ntf"),
        (("train", "train_policy", "kl_betta"), 0.1),
        (("rewards",), [{"fn": {"name": "ocr", "quality": 3}}]),
        (("nothing",), 1),
    ],
)
def test_mistakes_are_found(schema: dict[str, Any], path: tuple[str, ...], value: Any):
    recipe = tomllib.loads((ROOT / "configs/tiny/nft.toml").read_text(encoding="utf-8"))
    table = recipe
    for name in path[:-1]:
        table = table[name]
    table[path[-1]] = value
    assert mistakes(schema, recipe)


@pytest.mark.parametrize("value", ["all-linear", ["to_q"]])
def test_the_schema_accepts_every_form_of_target_modules(schema: dict[str, Any], value: Any):
    recipe = tomllib.loads((ROOT / "configs/tiny/nft.toml").read_text(encoding="utf-8"))
    recipe["policy"]["lora"] |= {"target_modules": value, "init_lora_weights": True}
    assert mistakes(schema, recipe) == []


def test_the_schema_has_the_options_of_shipped_plugins_and_of_a_recipes_own(schema: dict[str, Any], tmp_path: Path):
    text = json.dumps(schema)
    assert all(f'"const": "{name}"' in text for kind in plugins.KINDS[1:4] for name in plugins.own(kind))
    write_examples(tmp_path)
    recipe = tmp_path / "my_recipe.toml"
    values = tomllib.loads(recipe.read_text(encoding="utf-8"))
    assert mistakes(schema, values)
    assert mistakes(schema_of(str(recipe)), values) == []
    find([])


def test_the_page_of_fields_has_every_field(schema: dict[str, Any]):
    page = recipe_fields.markdown(schema)
    tables = [schema, *(table for table in schema["$defs"].values() if "properties" in table)]
    names = {name for table in tables for name in table["properties"]}
    assert [
        name for name in names if f"`{name}`" not in page and f"{name}]" not in page and f"{name} =" not in page
    ] == []
