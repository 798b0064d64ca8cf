"""Translation of cosmos-rl's own TOML files, of both schemas, to recipes of ours, with a report on every key."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, get_args

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers.cosmos_rl import diffusers, kinds, rows, wfm
from cosmos_rl_core.importers.cosmos_rl.rows import Upstream, Verdict
from cosmos_rl_core.importers.cosmos_rl.vlm import tables as vlm_tables

Schema = Literal["diffusers", "vlm", "wfm"]
"""cosmos-rl's kinds of files: of its diffusers path, of vision-language models in the same schema, and of its own
Cosmos-Predict2.5 path (``--wfm-mode``)."""

_TABLES: dict[Schema, ModuleType] = {"diffusers": diffusers, "vlm": vlm_tables, "wfm": wfm}
_OURS = ("rewards", "launch", "train.num_iterations")
"""Keys of recipes of this project. A recipe has some of them; a file of cosmos-rl has none of them."""
_SECTIONS = ("policy", "train", "rollout", "rewards", "validation", "logging")


@dataclass(frozen=True)
class Entry:
    """One line of the report."""

    key: str
    """cosmos-rl's key; empty for a setting that cosmos-rl has no key for."""
    value: Any
    said: bool
    """Whether the file has the key. If not, the value is cosmos-rl's default."""
    verdict: Verdict
    settings: Mapping[str, Any]
    """Settings of our recipe by dotted name; None marks one that the user must set."""
    why: str

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
        """Return the line of the error that refuses the key."""
        refused = self.key if self.verdict == "unknown" else self.written
        return f"{refused}: {self.why}"


@dataclass(frozen=True)
class Translation:
    """A recipe of ours and the report on its translation."""

    schema: Schema
    values: dict[str, Any]
    """Plain values of the recipe, not checked yet."""
    report: tuple[Entry, ...]

    def of(self, *verdicts: Verdict) -> list[Entry]:
        """Return the entries with one of some verdicts."""
        return [entry for entry in self.report if entry.verdict in verdicts]

    @property
    def mistakes(self) -> list[str]:
        """Return a line for each key that is unknown or refused."""
        return [entry.mistake for entry in self.of("unknown", "refused")]

    @property
    def summary(self) -> str:
        """Return one line: the number of keys of each verdict, and the settings left open."""
        counts = ((verdict, len(self.of(verdict))) for verdict in get_args(Verdict))
        words = ", ".join(f"{number} {verdict}" for verdict, number in counts if number)
        settings = [item for entry in self.of("open") for item in entry.settings.items()]
        names = sorted({name for name, held in settings if held is None})
        left = f"; still to set: {', '.join(names)}" if names else ""
        return f"a file of cosmos-rl ({self.schema}): {words}{left}"


def schema_of(values: Mapping[str, Any]) -> Schema | None:
    """Return the kind of a file of cosmos-rl, judged by its tables; None for a recipe of this project."""
    file = Upstream(values, {})
    if any(map(file.says, wfm.MARKS)) and not file.says("policy"):
        # Other trainers have a table [model], too.
        model = [key for key in file.values if key.startswith("model.")]
        return "wfm" if not model or any(rows.row_of(wfm.TABLE, key) is not None for key in model) else None
    if any(map(file.says, diffusers.MARKS)) and not any(map(file.says, _OURS)):
        return "vlm" if kinds.is_vlm(file) else "diffusers"
    return None


def translate(values: Mapping[str, Any]) -> Translation:
    """Return a file of cosmos-rl as our recipe, with the report on every key; mistakes are in the report.

    Raises :class:`ConfigError` if the file has neither schema, or asks for training that this project does not have.
    """
    schema = schema_of(values)
    if schema is None:
        raise ConfigError(
            "neither of cosmos-rl's schemas: expected its tables, e.g. [policy.parallelism] or [model.rl]"
        )
    tables = _TABLES[schema]
    upstream = Upstream(values, tables.DEFAULTS)
    if schema != "wfm":
        kinds.require_trained_here(upstream)
    report = tuple(_entries(upstream, tables))
    settings: dict[str, Any] = {}
    # Keys of the file come last, so that they replace defaults.
    for entry in sorted(report, key=lambda entry: entry.said):
        found = entry.settings.items()
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
        yield _entry(key, value, True, upstream, tables)
    for key, value in tables.DEFAULTS.items():
        if not upstream.says(key):
            found = _entry(key, value, False, upstream, tables)
            if found.verdict != "no effect here":
                yield found
    try:
        for settings, why in tables.implied(upstream):
            verdict = "open" if None in settings.values() else "translated"
            yield Entry("", None, False, verdict, settings, why)
    except ConfigError as error:
        yield Entry("", None, False, "refused", {}, str(error))


def _entry(key: str, value: Any, said: bool, upstream: Upstream, tables: ModuleType) -> Entry:
    if (row := rows.row_of(tables.TABLE, key)) is not None:
        return Entry(key, value, said, *rows.meaning(row, key, value, upstream))
    if value == {} and any(name.startswith(f"{key}.") for name in tables.TABLE):
        return Entry(key, value, said, "no effect here", {}, "an empty table")
    return Entry(key, value, said, "unknown", {}, _unknown(key, tables))


def _unknown(key: str, tables: ModuleType) -> str:
    """Return the message with the most similar known key."""
    known = [name for name in tables.TABLE if not name.endswith(".*")]
    close = difflib.get_close_matches(key, known, n=1)
    return f"unknown key; did you mean {close[0]!r}?" if close else "unknown key"
