"""Canonical JSON and its digest: equal values have equal bytes. NaN is refused."""

import hashlib
import json
from typing import Any

_SCALARS = frozenset((str, int, float, bool, type(None)))
_ENCODER = json.JSONEncoder(
    sort_keys=True, allow_nan=False, separators=(",", ":"), ensure_ascii=False, check_circular=False
)
"""Encoder without the check for circular references, which saves a third of the time.

A list that contains itself raises ``RecursionError``.
"""


def canonical_json(value: Any) -> bytes:
    """Encode plain JSON data (dict, list, str, number, bool, None) as sorted, compact UTF-8.

    Raises ``ValueError`` on NaN or infinity: NaN equals nothing, so it cannot identify anything.
    """
    return _ENCODER.encode(value).encode()


def from_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ``ValueError`` if it is not JSON, or is nested too deep to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its objects and lists are nested too deep to be read; flatten them") from None


def digest(value: Any) -> str:
    """Return the sha256 (hex) of the canonical JSON of ``value``."""
    return sha256(canonical_json(value))


def sha256(data: bytes) -> str:
    """Return the sha256 (hex) of bytes."""
    return hashlib.sha256(data).hexdigest()


def require_exchangeable(value: Any) -> None:
    """Raise ``TypeError``, which names the place, if JSON would change a part of ``value`` or its type.

    Dicts with string keys, lists, strings, numbers, booleans and None read back unchanged; their subclasses do not.
    JSON turns other keys into strings, tuples into lists, and members of an enumeration into their values. NaN passes.
    """
    found = _changed(value)
    if found is not None:
        raise TypeError(f"ranks exchange JSON, which would change value{found}; send plain lists and dicts")


def _changed(value: Any) -> str | None:
    """Return place, type and text of the first part that JSON would change, or None: ``["a"][0]: tuple (1, 2)``."""
    kind = type(value)
    if kind in _SCALARS:
        return None
    if kind is list:
        places = ((f"[{number}]", one) for number, one in enumerate(value))
    elif kind is dict:
        if (key := next((key for key in value if type(key) is not str), None)) is not None:
            return f": key {type(key).__name__} {_brief(key)}"
        places = ((f'["{key}"]', one) for key, one in value.items())
    else:
        return f": {kind.__name__} {_brief(value)}"
    return next((f"{place}{found}" for place, one in places if (found := _changed(one)) is not None), None)


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """Return one line for each value that differs in two JSON values, e.g. ``train.seed: 1 -> 2``."""
    if isinstance(old, dict) and isinstance(new, dict):
        found: list[str] = []
        for key in sorted(old.keys() | new.keys()):
            found += differences(old.get(key), new.get(key), f"{where}.{key}".lstrip("."))
        return found
    return [] if old == new else [f"{where}: {_brief(old)} -> {_brief(new)}"]


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
