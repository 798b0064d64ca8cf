"""Parts of the tables that translate cosmos-rl's settings: a file with flat keys, and rows, which translate one key."""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal

from cosmos_rl_core.errors import ConfigError

Verdict = Literal["taken", "translated", "no effect here", "open", "refused", "unknown"]
"""``open``: the user must set it, because the file does not say it. ``refused`` and ``unknown`` are mistakes."""

CLUSTER = "put processes, dp_shard_size = ... and cp_size = ... in a cluster profile (--cluster)"
FLOAT16 = "choose bfloat16 or float32: float16 needs loss scaling, which this project does not have"
DETERMINISTIC = "launch.deterministic sets it; default true"


class Upstream:
    """A file of cosmos-rl and its defaults, with flat keys such as ``trainer.callbacks[wandb].args.every_n``."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.values = dict(_flat(values, ""))
        self._defaults = defaults

    def __getitem__(self, key: str) -> Any:
        """Return the file's value, else cosmos-rl's default, else None."""
        return self.values.get(key, self._defaults.get(key))

    def says(self, key: str) -> bool:
        """Return whether the file has the key, or a key of the table of that name."""
        return any(name == key or name.startswith((f"{key}.", f"{key}[")) for name in self.values)

    def count(self, key: str) -> int:
        """Return a key's value, a whole number above 0. Raises :class:`ConfigError` if it is something else."""
        try:
            return count(self[key])
        except ConfigError as error:
            raise ConfigError(f"needs {key}, which {error}") from error


Answer = str | dict[str, Any] | tuple[dict[str, Any], str]
"""Our settings by dotted name, alone or with a reason; or only a reason, if the key has no effect here.

A setting that is None is left for the user to set.
"""
Row = str | Callable[[str, Any, Upstream], Answer]
"""The row of a key: its answer, or a function of key, value and file that returns it.

The function raises :class:`ConfigError` to refuse the value.
"""


Meaning = tuple[Verdict, Mapping[str, Any], str]
"""Verdict, our settings, and the reason."""


def meaning(row: Row, key: str, value: Any, upstream: Upstream) -> Meaning:
    """Return the verdict, our settings and the reason for a key's value, which follow from the row's answer."""
    try:
        answer = answer_of(row, key, value, upstream)
    except ConfigError as error:
        return "refused", {}, str(error)
    if isinstance(answer, str):
        return "no effect here", {}, answer
    settings, why = answer if isinstance(answer, tuple) else (answer, "")
    if None in settings.values():
        return "open", settings, why
    if settings == {key: value}:
        return "taken", settings, ""
    return "translated", settings, why


def answer_of(row: Row, key: str, value: Any, upstream: Upstream) -> Answer:
    """Return a row's answer for a key's value. Raises :class:`ConfigError` if the row refuses it."""
    return row if isinstance(row, str) else row(key, value, upstream)


def number(value: Any) -> float:
    """Return ``value`` if it is a finite number. Raises :class:`ConfigError` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError("must be a number")
    return value


def count(value: Any) -> int:
    """Return ``value`` if it is a whole number above 0. Raises :class:`ConfigError` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError("must be a whole number above 0")
    return value


def taken(key: str, value: Any, _: Upstream) -> Answer:
    """Return the same setting: name and meaning agree."""
    return {key: value}


def to(target: str, convert: Callable[[Any], Any] = lambda value: value, why: str = "") -> Row:
    """Return a row that renames a key and converts its value."""
    return lambda _, value, __: ({target: convert(value)}, why)


def named(target: str) -> Row:
    """Return a row that moves a key to the section ``target`` under its own name."""
    return lambda key, value, _: {f"{target}.{key.rpartition('.')[2]}": value}


def refused(why: str) -> Row:
    """Return a row that refuses every value."""

    def refuse(_: str, __: Any, ___: Upstream) -> Answer:
        raise ConfigError(why)

    return refuse


def among(values: Collection[Any], row: Row, other: Row) -> Row:
    """Return a row that is ``row`` for some values and ``other`` for all others."""
    return lambda key, value, file: answer_of(row if value in values else other, key, value, file)


def unless_none(row: Row) -> Row:
    """Return a row that leaves out values that mean absence: None, "" and the text "None"."""
    return among((None, "None", ""), "means absence", row)


def when(condition: Callable[[Upstream], bool], row: Row, why: str) -> Row:
    """Return a row that has no effect, for the reason ``why``, unless ``condition`` holds for the file."""
    return lambda key, value, file: answer_of(row if condition(file) else why, key, value, file)


def is_true(key: str) -> Callable[[Upstream], bool]:
    """Return a condition: the file or cosmos-rl's default sets the key to true."""
    return lambda file: file[key] is True


def table(groups: Mapping[str, Row]) -> dict[str, Row]:
    """Return a row for each key, from rows by key or by ``prefix: name name ...``."""
    found: dict[str, Row] = {}
    for names, row in groups.items():
        prefix, _, rest = names.rpartition(":")
        found |= {f"{prefix}.{name}" if prefix else name: row for name in rest.split()}
    return found


def row_of(table: Mapping[str, Row], key: str) -> Row | None:
    """Return the row of a key: its own, its array's (``a[*].b``), or its whole table's (``a.*``)."""
    for name in (key, re.sub(r"\[[^]]*\]", "[*]", key)):
        if name in table:
            return table[name]
        while name := name.rpartition(".")[0]:
            if f"{name}.*" in table:
                return table[f"{name}.*"]
    return None


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted name as nested tables."""
    values: dict[str, Any] = {}
    for name, value in settings.items():
        table = values
        *parents, last = name.split(".")
        for parent in parents:
            table = table.setdefault(parent, {})
        if isinstance(value, dict):
            table.setdefault(last, {}).update(value)
        else:
            table[last] = value
    return values


def _flat(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and (value or not key):
        for name, entry in value.items():
            yield from _flat(entry, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
        seen: dict[str, int] = {}
        for index, entry in enumerate(value):
            label = str(entry.get("name", index))
            seen[label] = seen.get(label, 0) + 1
            number = f"#{seen[label]}" if seen[label] > 1 else ""
            yield from _flat(entry, f"{key}[{label}{number}]")
    else:
        yield key, value
