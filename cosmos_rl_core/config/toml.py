"""TOML: a reader that limits depth and sizes, and a writer, which the standard library lacks."""

import itertools
import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

from cosmos_rl_core.errors import listed

MAX_DEPTH = 32
"""Most tables and arrays inside each other."""
MAX_TEXT = 2**16
"""Most characters of a text."""
SHOWN = 200
"""Most characters of a value that a message shows."""
WHOLE_NUMBERS = range(-(2**63), 2**63)
"""Whole numbers that TOML requires readers to accept: 64 bits."""
MOST_DIGITS = 100
"""Most digits and underscores of a whole number that are read: more than any number of 64 bits has."""


def loads(text: str) -> dict[str, Any]:
    """Return the values of a text. Raises ``TOMLDecodeError`` if it is not TOML, and another ``ValueError`` for
    values beyond the limits of this module.
    """
    values = parsed(text)
    if mistakes := cut_to_limits(values):
        raise ValueError(beyond_limits(mistakes))
    return values


def parsed(text: str) -> dict[str, Any]:
    """Return the values of a text without applying the limits, but keep only the first digits of very long numbers.

    Raises like :func:`loads` if the text is not TOML, or if its tables and arrays are too deep for Python to read.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"a table or an array is {_TOO_DEEP}") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:
        # Python refuses whole numbers of so many digits without naming the key; cut, they reach `cut_to_limits`.
        return tomllib.loads(_MANY_DIGITS.sub(lambda found: found[0][:MOST_DIGITS].rstrip("_"), text))


_MANY_DIGITS = re.compile(rf"(?<![\w.'\"])[0-9][0-9_]{{{MOST_DIGITS},}}")


_TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels; flatten it, so that at most {MAX_DEPTH} are inside each other"


def cut_to_limits(values: dict[str, Any]) -> list[str]:
    """Cut values that are nested too deep, too long or too large, in place; return a message for each, with its keys.

    Validation then finds the mistakes in the other values, too.
    """
    mistakes: list[str] = []
    level: list[tuple[str, Any]] = [("", values)]
    for _ in range(MAX_DEPTH):
        inside: list[tuple[str, Any]] = []
        for place, held in level:
            for key, value in [*(held.items() if isinstance(held, dict) else enumerate(held))]:
                at = f"{place}.{key}".lstrip(".")
                if (beyond := _beyond(value)) is not None:
                    held[key], why = beyond
                    mistakes.append(f"{_begun(at)} {why}")
                inside.append((at, value))
        level = [(at, value) for at, value in inside if isinstance(value, dict | list)]
    for place, value in level:
        value.clear()
        mistakes.append(f"{_begun(place)} is {_TOO_DEEP}")
    return mistakes


def _beyond(value: Any) -> tuple[Any, str] | None:
    """Return the cut value and the message for a text that is too long or a number that is too large; else None."""
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return value[:SHOWN], f"has {len(value)} characters; expected at most {MAX_TEXT}: shorten the text"
    if isinstance(value, int) and value not in WHOLE_NUMBERS:
        nearest = WHOLE_NUMBERS[0 if value < 0 else -1]
        return nearest, "is a whole number of more than 64 bits; expected at most 2^63 - 1, and at least -2^63"
    return None


def beyond_limits(mistakes: Sequence[str]) -> str:
    """Return one message for the mistakes of :func:`cut_to_limits`, at least one."""
    if len(mistakes) == 1:
        return mistakes[0]
    return listed(f"{len(mistakes)} values are beyond what a file may hold:", mistakes)


def _begun(place: str) -> str:
    """Return a place as a message shows it: its first :data:`SHOWN` characters."""
    return place if len(place) <= SHOWN else f"{place[:SHOWN]}..."


def shortened(value: Any) -> str:
    """Return a value as a message shows it: the first :data:`SHOWN` characters of its ``repr``."""
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
