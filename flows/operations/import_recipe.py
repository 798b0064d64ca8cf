"""What became of a file of cosmos-rl, for people: one line, the whole report, and the recipe as a file."""

import itertools
import shlex
from pathlib import Path
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from cosmos_rl_core import shipped
from cosmos_rl_core.config import toml
from cosmos_rl_core.config.recipe import read_toml
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers.cosmos_rl import translation

EXAMPLE = "one of cosmos-rl's configs"
LONGEST = 120
"""Characters of a key and its value in the report."""
TITLES = {"cosmos-rl": 6, "is": 2, "here": 6}
"""Columns of the report, and their relative widths."""


def note(recipe: str) -> str | None:
    """One line about a file of cosmos-rl, and how to see more; None for a recipe of ours.

    Raises :class:`ConfigError` if there is no TOML file.
    """
    values = read_toml(shipped.path_of(recipe, "recipe"), shipped.EXAMPLE)
    if translation.schema_of(values) is None:
        return None
    summary = translation_of(recipe).summary
    return f"{recipe} is {summary}; every key: {shlex.join(['cosmos-flows', 'import-recipe', recipe])}"


def translation_of(recipe: str) -> translation.Translation:
    """The translation of a file of cosmos-rl.

    Raises :class:`ConfigError` if it is none, or one of another kind of model.
    """
    values = read_toml(shipped.path_of(recipe, "recipe"), EXAMPLE)
    try:
        return translation.translate(values)
    except ConfigError as error:
        raise ConfigError(f"{recipe}: {error}") from error


def table(translation: translation.Translation) -> Table:
    """The report, a row a key; keys of one table that have no effect for one reason share a row."""
    columns = (Column(title, overflow="fold", ratio=ratio) for title, ratio in TITLES.items())
    shown = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for (_, verdict, here), entries in itertools.groupby(translation.report, _answer):
        shown.add_row(*map(Text, ("\n".join(_brief(entry.written) for entry in entries), verdict, here)))
    return shown


def as_json(translation: translation.Translation) -> dict[str, Any]:
    """For scripts: ``schema``, ``summary``, ``mistakes`` (a line for each key that is unknown or refused), ``values``
    (the recipe of ours, as far as it goes) and ``keys``: of each ``key`` of theirs ("" where there is none),
    ``written`` (key and value, secrets left out), ``said`` (false for a default of theirs), ``verdict``, ``settings``
    of ours (null where one is left to be set) and ``why``."""
    return {
        **{name: getattr(translation, name) for name in ("schema", "summary", "mistakes", "values")},
        "keys": [
            {name: getattr(entry, name) for name in ("key", "written", "said")} | vars(entry.meaning)
            for entry in translation.report
        ],
    }


def _answer(entry: translation.Entry) -> tuple[str, str, str]:
    """What rows are told apart by: the key or, without effect, its table; the verdict; what it is here, and why."""
    meaning = entry.meaning
    settings = [f"{name} = {held!r}" for name, held in meaning.settings.items() if held is not None]
    here = "\n".join([*settings, *filter(None, [meaning.why])])
    place = entry.key.rpartition(".")[0] if meaning.verdict == "no effect here" else entry.key
    return place, meaning.verdict, here


def _brief(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def write(translation: translation.Translation, source: str, output: str) -> None:
    """Write the recipe. Raises :class:`ConfigError` if keys were unknown or refused, or if there is such a file."""
    check(translation, source)
    try:
        with Path(output).open("x", encoding="utf-8") as stream:
            stream.write(f"# Translated from cosmos-rl's {Path(source).name} by `cosmos-flows import-recipe`.\n\n")
            stream.write(toml.dumps(translation.values))
    except FileExistsError as error:
        raise ConfigError(f"{output} is there already; name another file") from error
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}") from error


def check(translation: translation.Translation, source: str) -> None:
    """Raise one :class:`ConfigError` with every key that is unknown or refused, if any is."""
    if translation.mistakes:
        raise ConfigError("\n".join([f"{source}:", *(f"  {mistake}" for mistake in translation.mistakes)]))
