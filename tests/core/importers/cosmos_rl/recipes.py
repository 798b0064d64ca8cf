"""Recipes of cosmos-rl that tests change."""

import copy
import tomllib
from functools import cache
from pathlib import Path
from typing import Any


@cache
def _parsed(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def changed(path: Path, **changes: Any) -> dict[str, Any]:
    """A recipe with changes, ``a__b=value``; None takes a key away."""
    values = copy.deepcopy(_parsed(path))
    for key, value in changes.items():
        table = values
        *parents, last = key.split("__")
        for parent in parents:
            table = table.setdefault(parent, {})
        if value is None:
            table.pop(last, None)
        else:
            table[last] = value
    return values
