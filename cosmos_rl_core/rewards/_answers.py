"""Checks of a scorer's answers: finite scores for each sample, or an error."""

import math
from typing import Any

import numpy as np

LONGEST = 300
"""Largest number of characters of a value in messages and records."""


def entries(returned: Any, count: int) -> list[Any]:
    """Return the entries of an answer. Raises ``TypeError`` unless it is a list of ``count`` entries."""
    if not isinstance(returned, list | tuple):
        raise TypeError(f"the reward returned {_kind(returned)}, expected a list with an entry a sample")
    if len(returned) != count:
        raise TypeError(f"the reward returned {len(returned)} entries for {count} samples")
    return list(returned)


def scored(entry: Any, label: str) -> dict[str, Any] | Exception:
    """Return an entry as scores with a finite float ``label``, or as an error.

    Of the other values, finite numbers become floats, other numbers None, everything else text.
    """
    if isinstance(entry, Exception):
        return entry
    if not isinstance(entry, dict):
        return TypeError(
            f"the reward returned {_kind(entry)} for a sample, expected its scores by name or an exception"
        )
    if label not in entry:
        return KeyError(f"no score named {label!r} among {_brief(sorted(map(str, entry)))}")
    found = entry[label]
    if not _is_number(found):
        return TypeError(f"the score {label!r} is {_kind(found)}, expected a number")
    if (score := _finite(found)) is None:
        return ValueError(f"the score {label!r} is {_brief(found)}")
    return {str(name): _recorded(value) for name, value in entry.items()} | {label: score}


def words(error: Exception) -> str:
    """Return kind and message of an error, even if its message raises or cannot be encoded."""
    try:
        message = str(error)
    except Exception as broken:  # a plugin's own class
        message = f"its message raises {type(broken).__name__}"
    return f"{type(error).__name__}: {message}".encode(errors="backslashreplace").decode()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _finite(number: Any) -> float | None:
    try:
        value = float(number)
    except OverflowError:  # a whole number that no float holds
        return None
    return value if math.isfinite(value) else None


def _recorded(value: Any) -> Any:
    if _is_number(value):
        return _finite(value)
    return value if value is None or isinstance(value, bool) else _brief(value)


def _kind(value: Any) -> str:
    return "None" if value is None else f"{_brief(value)} ({type(value).__name__})"


def _brief(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception as broken:  # a plugin's own class
        text = f"a value whose text raises {type(broken).__name__}"
    text = " ".join(text.encode(errors="backslashreplace").decode().split())
    return f"{text[:LONGEST]}..." if len(text) > LONGEST else text
