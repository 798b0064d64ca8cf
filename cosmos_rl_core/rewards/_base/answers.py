"""Checks of a scorer's answers: finite scores for each sample, or an error."""

import math
from contextlib import suppress
from numbers import Real
from typing import Any

LONGEST = 300
"""Largest number of characters of a value in messages and records."""


def entries(returned: Any, count: int) -> list[Any]:
    """Return the entries of an answer. Raises ``TypeError`` unless it is a list of ``count`` entries."""
    if not isinstance(returned, list | tuple):
        expected = "expected a list with an entry a sample"
        raise TypeError(f"the reward returned {_kind(returned)}, {expected}")
    if len(returned) != count:
        raise TypeError(f"the reward returned {len(returned)} entries for {count} samples")
    return list(returned)


def scored(entry: Any, label: str) -> dict[str, Any] | Exception:
    """Return an entry as scores with a finite float ``label``, or as an error.

    Among the other values finite numbers become floats, other numbers None, and everything else text.
    """
    if isinstance(entry, Exception):
        return entry
    if not isinstance(entry, dict):
        expected = "expected its scores by name or an exception"
        return TypeError(f"the reward returned {_kind(entry)} for a sample, {expected}")
    if label not in entry:
        return KeyError(f"no score named {label!r} among {brief(sorted(map(str, entry)))}")
    if (score := finite(entry[label])) is None:
        return ValueError(f"the score {label!r} is {_kind(entry[label])}, expected a finite number")
    return {str(name): _recorded(value) for name, value in entry.items()} | {label: score}


def finite(value: Any) -> float | None:
    """Return a finite number as a float. Return None for anything else, true and false included."""
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):  # a whole number that no float holds
            return float(value) if math.isfinite(value) else None
    return None


def words(error: Exception) -> str:
    """Return kind and message of an error, as text that can be encoded."""
    return f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()


def brief(value: Any) -> str:
    """Return the beginning of a value's text on one line, for a message."""
    text = " ".join(str(value).encode(errors="backslashreplace").decode().split())
    return f"{text[:LONGEST]}..." if len(text) > LONGEST else text


def _recorded(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    return finite(value) if isinstance(value, Real) else brief(value)


def _kind(value: Any) -> str:
    return "None" if value is None else f"{brief(value)} ({type(value).__name__})"
