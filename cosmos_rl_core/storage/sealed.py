"""Write-once JSON files that contain their own digest, so that a reader notices any changed byte."""

import json
from typing import Any

from cosmos_rl_core.canonical import canonical_json, sha256
from cosmos_rl_core.errors import ArtifactError

FORMAT = 1
"""Newest format of sealed files; readers accept all earlier ones."""


def seal(kind: str, body: dict[str, Any]) -> bytes:
    """Encode plain JSON data with its kind, its format and a digest over all three.

    Raises ``ValueError`` on NaN or infinity.
    """
    return _sealed(canonical_json({**body, "format": FORMAT, "kind": kind}))


def unseal(data: bytes, kind: str, url: str) -> dict[str, Any]:
    """Return the body of a sealed file from the bytes found at ``url``.

    Raises :class:`ArtifactError`, which names ``url``, unless the bytes are exactly what :func:`seal` writes for
    this kind, or if a newer version wrote them.
    """
    try:
        found = json.loads(data)
        body = found["body"]
        intact = data == _sealed(canonical_json(body))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ArtifactError(
            f"{url} is damaged: not a sealed {kind} ({type(error).__name__}: {error}); {RESTORE}"
        ) from error
    if not intact or not isinstance(body, dict):
        raise ArtifactError(f"{url} is damaged: its digest does not match its contents; {RESTORE}")
    if body.get("kind") != kind:
        raise ArtifactError(f"{url} holds a {body.get('kind')!r}, expected a {kind!r}; {RESTORE}")
    form = body.get("format")
    if not isinstance(form, int) or not 1 <= form <= FORMAT:
        known = f"this version of cosmos-rl-flows reads formats up to {FORMAT}"
        advice = "a newer version wrote it; continue with that version"
        raise ArtifactError(f"{url} has format {form!r}, {known}: {advice}")
    return {key: value for key, value in body.items() if key not in {"kind", "format"}}


RESTORE = "restore it from a copy"
"""Advice for a damaged file."""


def _sealed(body: bytes) -> bytes:
    """Return the canonical JSON of a body and its digest. The body is encoded once only: runs have many such files."""
    return b'{"body":%b,"sha256":"%b"}' % (body, sha256(body).encode())
