"""Canonical JSON and its digest: two equal recipes have one spelling, and NaN has none."""

import hashlib
import json
from typing import Any


def canonical_json(value: Any) -> bytes:
    """Encode plain JSON data (dict, list, str, number, bool, None) as sorted, compact UTF-8.

    Raises ``ValueError`` on NaN or infinity: a number that equals nothing cannot be part of an identity.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest(value: Any) -> str:
    """Sha256 (hex) of the canonical JSON of ``value``."""
    return sha256(canonical_json(value))


def sha256(data: bytes) -> str:
    """Sha256 (hex) of bytes."""
    return hashlib.sha256(data).hexdigest()
