"""The JSON Schema of recipes, for editors and for pages: types, bounds, defaults, and the docstring of each field."""

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from cosmos_rl_core import outside_plugins, plugins
from cosmos_rl_core.config.base import Section
from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.config.train import AlgorithmOptions, DatasetOptions, RewardOptions
from cosmos_rl_core.recipes.reading import read_values

DRAFT = "http://json-schema.org/draft-07/schema#"
"""Newest draft that taplo supports, the TOML server of most editors."""
_INTERNAL = ("title", "identity", "neutral")
"""Keys that do not restrict the values of a field."""


def recipe_schema(recipe: str | None = None) -> dict[str, Any]:
    """Return the schema of recipes, with the options of each known plugin and of the plugins that ``recipe`` names.

    Raises :class:`ConfigError` if ``recipe`` is no TOML file or names a path that holds no plugin.
    """
    outside_plugins.find([] if recipe is None else read_values(recipe).get("plugins", []))
    schema = Recipe.model_json_schema(schema_generator=_Described)
    return {"$schema": DRAFT, "title": "A recipe of cosmos-rl-flows"} | schema


def documented(section: type[Section]) -> dict[str, str]:
    """Return the docstrings below the fields of a section, inherited ones included, as Markdown."""
    found: dict[str, str] = {}
    for cls in reversed(section.__mro__):
        if issubclass(cls, Section):
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
            assert isinstance(node, ast.ClassDef)
            found |= dict(_docstrings(node))
    return found


def _docstrings(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for line, following in itertools.pairwise(node.body):
        match line, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                yield name, markdown(text)


def markdown(docstring: str) -> str:
    """Return a docstring with its roles and literals as Markdown code."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", inspect.cleandoc(docstring))
    return text.replace("``", "`")


class _Described(GenerateJsonSchema):
    """Adds docstrings, writes tuples as the older draft does, and leaves out ``null``, which TOML does not have."""

    _begun: tuple[type, ...] = ()
    """Bases of plugin options whose definitions are being made."""

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        cls: type[Section] = schema["cls"]
        if cls in (AlgorithmOptions, RewardOptions, DatasetOptions):
            if cls in self._begun:
                # These options name plugins of their own kind: refer to the definition that is being made.
                return {}
            around, self._begun = self._begun, (*self._begun, cls)
            kind, _ = cls.plugin or ("", "")
            options = [plugins.load(kind, name).Options for name in plugins.known(kind)]
            schemas = [each.__pydantic_core_schema__ for each in options]
            described = {"anyOf": [self.generate_inner(each) for each in schemas]}
            self._begun = around
            return described
        described = super().model_schema(schema)
        described["description"] = markdown(cls.__doc__ or "")
        for name, text in documented(cls).items():
            if name in described["properties"]:
                described["properties"][name] |= {"description": text}
        for values in (described, *described["properties"].values()):
            for key in _INTERNAL:
                values.pop(key, None)
        return described

    def nullable_schema(self, schema: Any) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        found = super().default_schema(schema)
        # The default of a table follows from its fields.
        if found.get("default") is None or isinstance(found["default"], dict):
            found.pop("default", None)
        return found

    def tuple_schema(self, schema: Any) -> JsonSchemaValue:
        found = super().tuple_schema(schema)
        if "prefixItems" in found:
            found["items"] = found.pop("prefixItems")
        return found
