"""Reads cosmos-rl's own TOML files, of both its schemas, as recipes of ours, and says what became of every key."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from types import ModuleType
from typing import Any, Literal, get_args

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers.cosmos_rl import diffusers, wfm
from cosmos_rl_core.importers.cosmos_rl.rows import Meaning, Upstream, Verdict, nested, row_of

Schema = Literal["diffusers", "wfm"]
"""cosmos-rl's two kinds of files: of its diffusers path, and of its own Cosmos-Predict2.5 path (``--wfm-mode``)."""

_TABLES: dict[Schema, ModuleType] = {"diffusers": diffusers, "wfm": wfm}
_OURS = ("rewards", "launch", "train.num_iterations")
"""A recipe of ours has some of these; none of cosmos-rl's files has any."""
_SECTIONS = ("policy", "train", "rollout", "rewards", "validation", "logging")
_MISTAKES: tuple[Verdict, ...] = ("unknown", "refused")
_SECRET = ("token",)


@dataclass(frozen=True)
class Entry:
    """What became of one key."""

    key: str
    """Empty for a setting that cosmos-rl has no key for."""
    value: Any
    said: bool
    """Whether the file has it; where not, the value is the one that cosmos-rl takes."""
    meaning: Meaning

    @property
    def written(self) -> str:
        """Key and value as a person may see them."""
        if not self.key:
            return "in cosmos-rl's code"
        if self.key.rpartition(".")[2] in _SECRET and self.value:
            return f"{self.key} = ***"
        return f"{self.key} = {self.value!r}{'' if self.said else ' by default'}"


@dataclass(frozen=True)
class Translation:
    """A recipe of ours, and how it came about."""

    schema: Schema
    values: dict[str, Any]
    """Plain values, to be checked as any recipe's."""
    report: tuple[Entry, ...]

    def of(self, *verdicts: Verdict) -> list[Entry]:
        """The entries of some verdicts."""
        return [entry for entry in self.report if entry.meaning.verdict in verdicts]

    @property
    def mistakes(self) -> list[str]:
        """A line for each key that is unknown or refused."""
        return [
            f"{entry.key}: unknown key{'; ' if entry.meaning.why else ''}{entry.meaning.why}"
            if entry.meaning.verdict == "unknown"
            else f"{entry.written}: {entry.meaning.why}"
            for entry in self.of(*_MISTAKES)
        ]

    @property
    def summary(self) -> str:
        """One line: how many keys of each verdict, and what is left open."""
        counts = ((verdict, len(self.of(verdict))) for verdict in get_args(Verdict))
        words = ", ".join(f"{number} {verdict}" for verdict, number in counts if number)
        names = sorted(
            {name for entry in self.of("open") for name, held in entry.meaning.settings.items() if held is None}
        )
        left = f"; still to set: {', '.join(names)}" if names else ""
        return f"a file of cosmos-rl ({self.schema}): {words}{left}"


def schema_of(values: Mapping[str, Any]) -> Schema | None:
    """Which of cosmos-rl's schemas a file has, by its tables; None for a recipe of ours."""
    if any(_has(values, name) for name in wfm.MARKS) and not _has(values, "policy"):
        return "wfm"
    if any(_has(values, name) for name in diffusers.MARKS) and not any(_has(values, name) for name in _OURS):
        return "diffusers"
    return None


def translate(values: Mapping[str, Any]) -> Translation:
    """Plain values of a file of cosmos-rl, as ours, with the report of every key; mistakes are in the report.

    Raises :class:`ConfigError` if the file has neither of its schemas, or is not of a diffusion model.
    """
    schema = schema_of(values)
    if schema is None:
        raise ConfigError(
            "neither of cosmos-rl's schemas: expected its tables, e.g. [policy.parallelism] or [model.rl]"
        )
    tables = _TABLES[schema]
    upstream = Upstream(values, tables.DEFAULTS)
    tables.check_kind(upstream)
    report = [*_entries(upstream, tables)]
    settings: dict[str, Any] = {}
    # What is written last, so that it replaces what is taken by default.
    for entry in sorted(report, key=lambda entry: entry.said):
        settings |= {name: held for name, held in entry.meaning.settings.items() if held is not None}
    found = nested(settings)
    ordered = {section: found[section] for section in _SECTIONS if section in found}
    return Translation(schema, ordered, tuple(report))


def translated(values: dict[str, Any], source: str) -> dict[str, Any]:
    """The values of a recipe of ours: as they are, or translated from a file of cosmos-rl.

    Raises one :class:`ConfigError` with every key that is unknown or refused.
    """
    if schema_of(values) is None:
        return values
    try:
        translation = translate(values)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    if translation.mistakes:
        raise ConfigError("\n".join([f"{source}, {translation.summary}:", *(f"  {m}" for m in translation.mistakes)]))
    return translation.values


def _entries(upstream: Upstream, tables: ModuleType) -> Iterator[Entry]:
    for key, value in upstream.values.items():
        yield Entry(key, value, True, _meaning(key, value, upstream, tables))
    for key, value in tables.DEFAULTS.items():
        if not upstream.says(key):
            meaning = _meaning(key, value, upstream, tables)
            if meaning.verdict != "no effect here":
                yield Entry(key, value, False, meaning)
    try:
        for settings, why in tables.implied(upstream):
            yield Entry("", None, False, Meaning("translated", settings, why))
    except ConfigError as error:
        yield Entry("", None, False, Meaning("refused", why=str(error)))


def _meaning(key: str, value: Any, upstream: Upstream, tables: ModuleType) -> Meaning:
    row = row_of(tables.TABLE, key)
    if row is None:
        if value == {} and any(name.startswith(f"{key}.") for name in tables.TABLE):
            return Meaning("no effect here", why="an empty table")
        return Meaning("unknown", why=_nearest(key, tables))
    try:
        return row(key, value, upstream)
    except ConfigError as error:
        return Meaning("refused", why=str(error))


def _nearest(key: str, tables: ModuleType) -> str:
    """The known key that is most like this one: beside it if there is any, else anywhere."""
    known = [name for name in tables.TABLE if not name.endswith(".*")]
    parent, _, last = key.rpartition(".")
    beside = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == parent}
    if close := difflib.get_close_matches(last, beside, n=1):
        return f"did you mean {beside[close[0]]!r}?"
    close = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {close[0]!r}?" if close else ""


def _has(values: Mapping[str, Any], name: str) -> bool:
    found = reduce(lambda table, part: table.get(part) if isinstance(table, Mapping) else None, name.split("."), values)
    return found is not None
