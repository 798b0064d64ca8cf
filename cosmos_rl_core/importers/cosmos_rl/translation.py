"""Translation of cosmos-rl's own TOML files, of both schemas, to recipes of ours, with a report on every key."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, get_args

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers.cosmos_rl import diffusers, rows, wfm
from cosmos_rl_core.importers.cosmos_rl.rows import Meaning, Upstream, Verdict

Schema = Literal["diffusers", "wfm"]
"""cosmos-rl's two kinds of files: of its diffusers path, and of its own Cosmos-Predict2.5 path (``--wfm-mode``)."""

_TABLES: dict[Schema, ModuleType] = {"diffusers": diffusers, "wfm": wfm}
_OURS = ("rewards", "launch", "train.num_iterations")
"""Keys of our recipes: one of ours has some of them, a file of cosmos-rl has none."""
_SECTIONS = ("policy", "train", "rollout", "rewards", "validation", "logging")


@dataclass(frozen=True)
class Entry:
    """One line of the report."""

    key: str
    """cosmos-rl's key; empty for a setting that cosmos-rl has no key for."""
    value: Any
    said: bool
    """Whether the file has the key. If not, the value is cosmos-rl's default."""
    meaning: Meaning

    @property
    def written(self) -> str:
        """Return key and value as text, without secrets."""
        if not self.key:
            return "in cosmos-rl's code"
        if self.key.endswith(".token") and self.value:
            return f"{self.key} = ***"
        return f"{self.key} = {self.value!r}{'' if self.said else ' by default'}"

    @property
    def mistake(self) -> str:
        """Return the line that refuses the key."""
        refused = self.key if self.meaning.verdict == "unknown" else self.written
        return f"{refused}: {self.meaning.why}"


@dataclass(frozen=True)
class Translation:
    """A recipe of ours and the report on its translation."""

    schema: Schema
    values: dict[str, Any]
    """Plain values of the recipe, not checked yet."""
    report: tuple[Entry, ...]

    def of(self, *verdicts: Verdict) -> list[Entry]:
        """Return the entries with one of some verdicts."""
        return [entry for entry in self.report if entry.meaning.verdict in verdicts]

    @property
    def mistakes(self) -> list[str]:
        """Return a line for each key that is unknown or refused."""
        return [entry.mistake for entry in self.of("unknown", "refused")]

    @property
    def summary(self) -> str:
        """Return one line: the number of keys of each verdict, and the settings left open."""
        counts = ((verdict, len(self.of(verdict))) for verdict in get_args(Verdict))
        words = ", ".join(f"{number} {verdict}" for verdict, number in counts if number)
        left_open = [entry.meaning.settings for entry in self.of("open")]
        names = sorted({name for found in left_open for name, held in found.items() if held is None})
        left = f"; still to set: {', '.join(names)}" if names else ""
        return f"a file of cosmos-rl ({self.schema}): {words}{left}"


def schema_of(values: Mapping[str, Any]) -> Schema | None:
    """Return which of cosmos-rl's schemas a file has, judged by its tables; None for a recipe of ours."""
    file = Upstream(values, {})
    if any(map(file.says, wfm.MARKS)) and not file.says("policy"):
        return "wfm"
    if any(map(file.says, diffusers.MARKS)) and not any(map(file.says, _OURS)):
        return "diffusers"
    return None


def translate(values: Mapping[str, Any]) -> Translation:
    """Return a file of cosmos-rl as our recipe, with the report on every key; mistakes are in the report.

    Raises :class:`ConfigError` if the file has neither schema, or is not of a diffusion model.
    """
    schema = schema_of(values)
    if schema is None:
        raise ConfigError(
            "neither of cosmos-rl's schemas: expected its tables, e.g. [policy.parallelism] or [model.rl]"
        )
    tables = _TABLES[schema]
    upstream = Upstream(values, tables.DEFAULTS)
    tables.check_kind(upstream)
    report = tuple(_entries(upstream, tables))
    settings: dict[str, Any] = {}
    # Keys of the file come last, so that they replace defaults.
    for entry in sorted(report, key=lambda entry: entry.said):
        found = entry.meaning.settings.items()
        settings |= {name: value for name, value in found if value is not None}
    tables_of_ours = rows.nested(settings)
    ordered = {name: tables_of_ours[name] for name in _SECTIONS if name in tables_of_ours}
    return Translation(schema, ordered, report)


def translated(values: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the values of our recipe: unchanged, or translated from a file of cosmos-rl.

    Raises one :class:`ConfigError` with every key that is unknown or refused.
    """
    if schema_of(values) is None:
        return values
    try:
        translation = translate(values)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    if translation.mistakes:
        raise ConfigError("\n  ".join([f"{source}, {translation.summary}:", *translation.mistakes]))
    return translation.values


def _entries(upstream: Upstream, tables: ModuleType) -> Iterator[Entry]:
    for key, value in upstream.values.items():
        yield Entry(key, value, True, _meaning(key, value, upstream, tables))
    for key, value in tables.DEFAULTS.items():
        if not upstream.says(key):
            found = _meaning(key, value, upstream, tables)
            if found.verdict != "no effect here":
                yield Entry(key, value, False, found)
    try:
        for settings, why in tables.implied(upstream):
            yield Entry("", None, False, Meaning("translated", settings, why))
    except ConfigError as error:
        yield Entry("", None, False, Meaning("refused", why=str(error)))


def _meaning(key: str, value: Any, upstream: Upstream, tables: ModuleType) -> Meaning:
    if (row := rows.row_of(tables.TABLE, key)) is not None:
        return rows.meaning(row, key, value, upstream)
    if value == {} and any(name.startswith(f"{key}.") for name in tables.TABLE):
        return Meaning("no effect here", why="an empty table")
    return Meaning("unknown", why=_unknown(key, tables))


def _unknown(key: str, tables: ModuleType) -> str:
    """Return the message with the most similar known key, of the same table if there is one."""
    known = [name for name in tables.TABLE if not name.endswith(".*")]
    parent, _, last = key.rpartition(".")
    beside = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == parent}
    close = [beside[name] for name in difflib.get_close_matches(last, beside, n=1)]
    close = close or difflib.get_close_matches(key, known, n=1)
    return f"unknown key; did you mean {close[0]!r}?" if close else "unknown key"
