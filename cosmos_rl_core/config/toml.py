"""Writer of TOML, which the standard library only reads."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any


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
