"""Canonical JSON and its digest: equal values have equal bytes. NaN is refused."""

import hashlib
import json
from typing import Any

_COMPACT: dict[str, Any] = {"separators": (",", ":"), "ensure_ascii": False}


def canonical_json(value: Any) -> bytes:
    """Encode plain JSON data (dict, list, str, number, bool, None) as sorted, compact UTF-8.

    Raises ``ValueError`` on NaN or infinity: NaN equals nothing, so it cannot identify anything.
    """
    return json.dumps(value, sort_keys=True, allow_nan=False, **_COMPACT).encode()


def digest(value: Any) -> str:
    """Return the sha256 (hex) of the canonical JSON of ``value``."""
    return sha256(canonical_json(value))


def sha256(data: bytes) -> str:
    """Return the sha256 (hex) of bytes."""
    return hashlib.sha256(data).hexdigest()


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
