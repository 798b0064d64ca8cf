"""One HTML file about a run."""

from typing import Any

from stages.contracts import Request
from stages.runner import Context


def run(request: Request, context: Context) -> dict[str, Any]:
    """Write ``index.html``."""
    context.attempt.put("index.html", b"<!doctype html>")
    return {}
