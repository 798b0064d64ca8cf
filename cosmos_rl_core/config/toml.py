"""Writer of TOML, which the standard library only reads."""

import itertools
import json
import math
import re
from collections.abc import Iterator
from typing import Any

LINE_LENGTH = 120


def dumps(values: dict[str, Any]) -> str:
    """Return a recipe's plain values as TOML: a table per section, a line per setting.

    Raises ``TypeError`` for a value that TOML cannot hold, such as None.
    """
    return "\n".join(_table(values, ())).strip() + "\n"


def _table(values: dict[str, Any], name: tuple[str, ...]) -> Iterator[str]:
    plain = {key: value for key, value in values.items() if not _has_header(value)}
    lines = [_line(key, value) for key, value in plain.items()]
    if name and (lines or not values):
        yield from ["", f"[{'.'.join(map(_key, name))}]"]
    yield from lines
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _table(value, (*name, key))
        elif _has_header(value):
            for entry in value:
                yield from ["", f"[[{'.'.join(map(_key, (*name, key)))}]]"]
                yield from itertools.starmap(_line, entry.items())


def _has_header(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(entry, dict) for entry in value)
    return isinstance(value, dict)


def _line(key: str, value: Any) -> str:
    return f"{_key(key)} = {_value(value)}"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _text(key)


def _text(text: str) -> str:
    # A basic string has JSON's escapes and one more.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        items = [_value(item) for item in value]
        line = f"[{', '.join(items)}]"
        if len(line) < LINE_LENGTH - 20:
            return line
        return "\n".join(["[", *(f"    {item}," for item in items), "]"])
    if isinstance(value, dict):
        return f"{{ {', '.join(itertools.starmap(_line, value.items()))} }}"
    raise TypeError(f"TOML has no spelling for {value!r}")
