"""Sphinx extension: the fields of recipes as Markdown, in place of a comment in a page, from their JSON Schema."""

import json
from collections.abc import Iterator
from typing import Any

from sphinx.application import Sphinx

from cosmos_rl_core.recipes.schema import recipe_schema

MARK = "<!-- fields of recipes -->"
PLUGINS = {"AlgorithmOptions": "Algorithms", "RewardOptions": "Rewards", "DatasetOptions": "Datasets"}
"""Heading of the options of each kind of plugin, by the name of their definition."""
Schema = dict[str, Any]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension, which replaces :data:`MARK` before a page is parsed."""
    app.connect("source-read", _fill_in)
    return {"parallel_read_safe": True}


def _fill_in(_app: Sphinx, _docname: str, source: list[str]) -> None:
    if MARK in source[0]:
        source[0] = source[0].replace(MARK, markdown(recipe_schema()))


def markdown(schema: Schema) -> str:
    """Return a heading for each table of a recipe, with its fields below, then the options of all plugins."""
    defs = schema["$defs"]
    lines = [*_tables(schema, "", defs), *(line for name in PLUGINS for line in _plugins(name, defs))]
    return "\n".join(lines)


def _tables(table: Schema, path: str, defs: Schema) -> Iterator[str]:
    """Yield the lines of a table, and of the tables in it."""
    yield from _fields(table, defs)
    for name, field in table["properties"].items():
        where = f"{path}.{name}".lstrip(".")
        inner, heading = _definition(field), f"[{where}]"
        if inner is None and field.get("type") == "array":
            inner, heading = _definition(field["items"]), f"[[{where}]]"
        if inner is not None and inner not in PLUGINS:
            yield from [f"## `{heading}`", "", defs[inner]["description"], ""]
            yield from _tables(defs[inner], where, defs)


def _plugins(name: str, defs: Schema) -> Iterator[str]:
    """Yield the fields that all plugins of a kind have, then the fields of each."""
    options = [defs[str(_definition(each))] for each in defs[name]["anyOf"]]
    key = next(field for field, values in options[0]["properties"].items() if "const" in values)
    common = [field for field in options[0]["properties"] if all(field in each["properties"] for each in options)]
    yield from [f"## {PLUGINS[name]}", ""]
    yield from _fields(_only(options[0], [field for field in common if field != key]), defs)
    for each in options:
        yield from [f'### `{key} = "{each["properties"][key]["const"]}"`', "", each["description"], ""]
        own = _only(each, [field for field in each["properties"] if field not in common])
        yield from _fields(own, defs)
        for field, values in own["properties"].items():
            inner = _definition(values.get("items", {}))
            if inner is not None:
                yield from [
                    f"#### `[[{field}]]`",
                    "",
                    " ".join([defs[inner]["description"], values["description"]]),
                    "",
                ]
                yield from _fields(defs[inner], defs)


def _only(table: Schema, fields: list[str]) -> Schema:
    return table | {"properties": {field: table["properties"][field] for field in fields}}


def _fields(table: Schema, defs: Schema) -> Iterator[str]:
    """Yield Markdown lines for each field, except for tables, which have a heading of their own."""
    for name, field in table["properties"].items():
        inner = _definition(field) or _definition(field.get("items", {}))
        if inner is not None and inner not in PLUGINS:
            continue
        facts = [_values(field)]
        if name in table.get("required", ()):
            facts.append("required")
        if "default" in field:
            facts.append(f"default `{json.dumps(field['default'])}`")
        yield from [f"`{name}` ({', '.join(facts)})", f": {' '.join(field.get('description', '').split())}", ""]


def _values(field: Schema) -> str:
    """Return the values that a field takes, in words."""
    if (inner := _definition(field)) is not None:
        return f"one of the [{PLUGINS[inner].lower()}](#{PLUGINS[inner].lower()})" if inner in PLUGINS else "table"
    if "anyOf" in field:
        return " or ".join(map(_values, field["anyOf"]))
    if "const" in field or "enum" in field:
        return " or ".join(f"`{json.dumps(value)}`" for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return "list"
    if field.get("type") == "object":
        return "table"
    bounds = [f"{sign} {field[key]}" for key, sign in _BOUNDS.items() if key in field]
    return " ".join([field.get("type", "any value"), " and ".join(bounds)]).strip()


_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def _definition(field: Any) -> str | None:
    """Return the name of the definition that a schema refers to."""
    return field["$ref"].rpartition("/")[2] if isinstance(field, dict) and "$ref" in field else None
