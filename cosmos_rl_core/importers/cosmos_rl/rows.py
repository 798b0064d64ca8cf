"""What the tables of cosmos-rl's settings are made of: a file as flat keys, and rows that say what a key means here."""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cosmos_rl_core.errors import ConfigError

Verdict = Literal["taken", "translated", "no effect here", "open", "refused", "unknown"]
"""``open``: the file cannot say it, so whoever runs it must. ``refused`` and ``unknown`` are mistakes."""

CLUSTER = "put processes = ..., dp_shard_size = ... and cp_size = ... in a cluster profile (--cluster)"
SHARDS = "put dp_shard_size = ... in a cluster profile (deployments/clusters, --cluster)"
LANGUAGE = "a setting of language models"
NOT_READ = "cosmos-rl does not read it for diffusion models"
PRECISIONS = ("bfloat16", "float32")
NO_FLOAT16 = "choose bfloat16 or float32: float16 needs a scale of the loss, which there is none of here"


@dataclass(frozen=True)
class Meaning:
    """What a key's value is here: settings of our recipe by dotted name, and why they are not what was written."""

    verdict: Verdict
    settings: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""


class Upstream:
    """A file of cosmos-rl by flat keys, ``trainer.callbacks[wandb].args.every_n``, with the defaults that it has."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.values = dict(_flat(values, ""))
        self._defaults = defaults

    def __getitem__(self, key: str) -> Any:
        """What the file says or cosmos-rl takes in its place; None where neither is known."""
        return self.values.get(key, self._defaults.get(key))

    def says(self, key: str) -> bool:
        """Whether the key, or one of the table of that name, is in the file."""
        return any(name == key or name.startswith((f"{key}.", f"{key}[")) for name in self.values)

    def count(self, key: str) -> int:
        """The whole number above 0 of a key. Raises :class:`ConfigError` if it is something else."""
        try:
            return count(self[key])
        except ConfigError as error:
            raise ConfigError(f"needs {key}, which {error}") from error


Row = Callable[[str, Any, Upstream], Meaning]
"""A key's row: from the key, its value and the whole file to what it is here. Raises :class:`ConfigError` to refuse."""


def number(value: Any) -> float:
    """The value, if it is a finite number. Raises :class:`ConfigError` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError("must be a number")
    return value


def count(value: Any) -> int:
    """The value, if it is a whole number above 0. Raises :class:`ConfigError` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError("must be a whole number above 0")
    return value


def taken(key: str, value: Any, _: Upstream) -> Meaning:
    """The same name, the same meaning."""
    return Meaning("taken", {key: value})


def to(target: str, convert: Callable[[Any], Any] = lambda value: value, why: str = "") -> Row:
    """Another name, and another value where ``convert`` makes one."""

    def row(key: str, value: Any, _: Upstream) -> Meaning:
        ours = convert(value)
        return Meaning("taken" if key == target and ours == value else "translated", {target: ours}, why)

    return row


def no_effect(why: str) -> Row:
    """Read, and of no consequence here."""
    return lambda _, __, ___: Meaning("no effect here", why=why)


def only(expected: Any, why: str, otherwise: str) -> Row:
    """Without effect at one value, or at any of a tuple of them; refused at any other."""
    allowed = expected if isinstance(expected, tuple) else (expected,)

    def row(_: str, value: Any, __: Upstream) -> Meaning:
        if value not in allowed:
            raise ConfigError(otherwise)
        return Meaning("no effect here", why=why)

    return row


def among(allowed: Collection[Any], row: Row, otherwise: str) -> Row:
    """As ``row`` at the ``allowed`` values; refused at any other."""

    def checked(key: str, value: Any, upstream: Upstream) -> Meaning:
        if value not in allowed:
            raise ConfigError(otherwise)
        return row(key, value, upstream)

    return checked


def refused(why: str) -> Row:
    """A mistake, whatever its value."""
    return lambda _, __, ___: Meaning("refused", why=why)


def unless_none(row: Row) -> Row:
    """As ``row``; a value that stands for absence, None or the text "None", is left out."""

    def checked(key: str, value: Any, upstream: Upstream) -> Meaning:
        if value in (None, "None", ""):
            return Meaning("no effect here", why="stands for absence")
        return row(key, value, upstream)

    return checked


def when(condition: Callable[[Upstream], bool], row: Row, why: str) -> Row:
    """As ``row`` where a condition on the file holds; without effect for the reason ``why`` elsewhere."""
    other = no_effect(why)
    return lambda key, value, upstream: (row if condition(upstream) else other)(key, value, upstream)


def rows(row: Row, prefix: str, names: str) -> dict[str, Row]:
    """One row for several keys: ``names`` are separated by spaces."""
    return {f"{prefix}{name}": row for name in names.split()}


def row_of(table: Mapping[str, Row], key: str) -> Row | None:
    """The row of a key: its own, its array's (``a[*].b``), or that of its whole table (``a.*``)."""
    for name in (key, re.sub(r"\[[^]]*\]", "[*]", key)):
        candidates = [name, *(f"{name[:i]}.*" for i in range(len(name) - 1, 0, -1) if name[i] == ".")]
        for candidate in candidates:
            if candidate in table:
                return table[candidate]
    return None


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Tables from dotted names; ``rewards[x].weight`` is a setting of one entry of the array ``rewards``."""
    values: dict[str, Any] = {}
    entries: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        table = values
        *parents, last = re.findall(r"[^.\[\]]+(?:\[[^]]*\])?", name)
        for parent in parents:
            array, bracket, _ = parent.partition("[")
            if not bracket:
                table = table.setdefault(parent, {})
                continue
            if parent not in entries:
                entries[parent] = {}
                table.setdefault(array, []).append(entries[parent])
            table = entries[parent]
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
            yield from _flat(entry, f"{key}[{label}{f'#{seen[label]}' if seen[label] > 1 else ''}]")
    else:
        yield key, value
