"""Canonical JSON and its digest: two equal recipes have one spelling, and NaN has none."""

import hashlib
import json
from pathlib import Path
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


def files_digest(files: dict[str, Path]) -> str:
    """Sha256 (hex) over names and bytes of files; times, order and where they lie do not count."""
    return digest([[name, file_sha256(files[name])] for name in sorted(files)])


def file_sha256(file: Path) -> str:
    """Sha256 (hex) of a file's bytes, which are not in memory as a whole."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
