"""The translation of a cosmos-rl file: as one line, as a full report, and as a recipe."""

import itertools
import os
import shlex
from pathlib import Path
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from cosmos_rl_core import shipped
from cosmos_rl_core.config import toml
from cosmos_rl_core.config.reading import read_toml
from cosmos_rl_core.errors import ConfigError, Mistakes, NoSpaceError, UnavailableError
from cosmos_rl_core.importers import translation
from cosmos_rl_core.storage import store

EXAMPLE = "one of cosmos-rl's configs"
LONGEST = 120
"""Maximum characters of a key and its value in the report."""
SHOWN = ("key", "written", "said", "verdict", "settings", "why")
"""Fields of a key that scripts get. The value of the key is left out, because it may be a secret."""
TITLES = {"cosmos-rl": 6, "is": 2, "here": 6}
"""Columns of the report, and their relative widths."""


def note(recipe: str) -> str | None:
    """Return a line about a cosmos-rl file and the command that prints more; None for a recipe of this project.

    Raises :class:`ConfigError` if there is no such TOML file.
    """
    # The plan reports values beyond limits, with all other mistakes.
    values = read_toml(shipped.path_of(recipe, "recipe"), shipped.EXAMPLE, Mistakes())
    if translation.schema_of(values) is None:
        return None
    command = shlex.join(["cosmos-flows", "import-recipe", recipe])
    return f"{recipe} is {translation_of(recipe).summary}; every key: {command}"


def translation_of(recipe: str) -> translation.Translation:
    """Translate a cosmos-rl file.

    Raises :class:`ConfigError` if it is not one, or is one for another kind of model.
    """
    values = read_toml(shipped.path_of(recipe, "recipe"), EXAMPLE)
    try:
        return translation.translate(values)
    except ConfigError as error:
        raise ConfigError(f"{recipe}: {error}") from error


def table(translation: translation.Translation) -> Table:
    """Return the report, one row per key. Keys of a TOML table without effect for the same reason share a row."""
    columns = (Column(title, overflow="fold", ratio=ratio) for title, ratio in TITLES.items())
    shown = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for (_, verdict, here), entries in itertools.groupby(translation.report, _answer):
        written = "\n".join(_brief(entry.written) for entry in entries)
        shown.add_row(*map(Text, (written, verdict, here)))
    return shown


def as_json(translation: translation.Translation) -> dict[str, Any]:
    """Return the translation for scripts.

    Keys: ``schema``, ``summary``, ``mistakes`` (a line for each unknown or refused key), ``values`` (our recipe) and
    ``keys``. Each key has ``key`` (theirs, or ""), ``written`` (key and value without secrets), ``said`` (false for a
    default of theirs), ``verdict``, ``settings`` (ours; null if it must still be set) and ``why``.
    """
    keys = [_fields(entry, *SHOWN) for entry in translation.report]
    return {**_fields(translation, "schema", "summary", "mistakes", "values"), "keys": keys}


def _fields(value: object, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _answer(entry: translation.Entry) -> tuple[str, str, str]:
    """Return the key, or its table if it has no effect; the verdict; and this project's settings with the reason."""
    settings = [f"{name} = {held!r}" for name, held in entry.settings.items() if held is not None]
    here = "\n".join([*settings, *filter(None, [entry.why])])
    place = entry.key.rpartition(".")[0] if entry.verdict == "no effect here" else entry.key
    return place, entry.verdict, here


def _brief(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def write(translation: translation.Translation, source: str, output: str) -> None:
    """Write the whole recipe into a new file, or nothing.

    Raises :class:`ConfigError` if a key is unknown or refused, the file exists or cannot be written, and
    :class:`NoSpaceError` on a full disk.
    """
    check(translation, source)
    first = f"# Translated from cosmos-rl's {Path(source).name} by `cosmos-flows import-recipe`.\n\n"
    data = (first + toml.dumps(translation.values)).encode()
    try:
        if os.path.lexists(output) or not store.put_if_absent(os.path.abspath(output), data):
            raise ConfigError(f"{output} exists; name another file")
    except NoSpaceError:
        raise
    except UnavailableError as error:
        raise ConfigError(str(error)) from error


def check(translation: translation.Translation, source: str) -> None:
    """Raise one :class:`ConfigError` that lists all unknown and refused keys, if there are any."""
    if translation.mistakes:
        raise ConfigError("\n  ".join([f"{source}:", *translation.mistakes]))
