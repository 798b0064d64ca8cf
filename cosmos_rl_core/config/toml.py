"""TOML: a reader within limits, and a writer, which the standard library has not."""

import itertools
import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

MAX_DEPTH = 32
"""Tables and arrays inside each other."""
MAX_TEXT = 2**16
"""Characters of a text."""
SHOWN = 200
"""Characters that a message shows of a value."""
WHOLE_NUMBERS = range(-(2**63), 2**63)
"""Whole numbers that TOML asks readers to take."""


def loads(text: str) -> dict[str, Any]:
    """Return the values of a text. Raises ``TOMLDecodeError`` if it is not TOML, and another ``ValueError`` for
    values beyond the limits of this module.
    """
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_limits(values)
    return values


_TOO_DEEP = f"tables and arrays are nested deeper than {MAX_DEPTH} levels"


def check_limits(values: dict[str, Any]) -> None:
    """Raise ``ValueError`` for values that are nested too deep, too long or too large, with the key of the first."""
    level = [("", values)]
    for _ in range(MAX_DEPTH):
        inside: list[tuple[str, Any]] = []
        for place, held in level:
            pairs = held.items() if isinstance(held, dict) else enumerate(held)
            inside += [(f"{place}.{key}".lstrip("."), value) for key, value in pairs]
        for place, value in inside:
            if isinstance(value, str) and len(value) > MAX_TEXT:
                raise ValueError(f"{place} has {len(value)} characters; expected at most {MAX_TEXT}")
            if isinstance(value, int) and value not in WHOLE_NUMBERS:
                raise ValueError(f"{place} is a whole number of more than 64 bits; expected at most 2^63 - 1")
        level = [(place, value) for place, value in inside if isinstance(value, dict | list)]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def shortened(value: Any) -> str:
    """Return a value as a message shows it."""
    shown = repr(value)
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}... ({len(shown)} characters)"


def dumps(values: dict[str, Any]) -> str:
    """Return a recipe's plain values as TOML: a table per section, a line per setting. No value may be None."""
    return "\n".join(_table(values, "")).strip() + "\n"


def _table(values: dict[str, Any], name: str) -> Iterator[str]:
    tables = {key: held for key, held in values.items() if _has_header(held)}
    lines = [_line(key, held) for key, held in values.items() if key not in tables]
    if name and (lines or not values):
        yield from ["", f"[{name}]"]
    yield from lines
    for key, held in tables.items():
        place = f"{name}.{_key(key)}".lstrip(".")
        if isinstance(held, dict):
            yield from _table(held, place)
        else:
            for entry in held:
                yield from ["", f"[[{place}]]", *itertools.starmap(_line, entry.items())]


def _has_header(value: Any) -> bool:
    """Return whether a value is a table or an array of tables."""
    entries = value if isinstance(value, list) else [value]
    return bool(entries) and all(isinstance(entry, dict) for entry in entries)


def _line(key: str, value: Any) -> str:
    return f"{_key(key)} = {_value(value)}"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(itertools.starmap(_line, value.items()))} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, float):
        return repr(value)  # JSON spells infinity and NaN in another way
    # A basic string has JSON's escapes and one more.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
