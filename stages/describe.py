"""Captions of one part of a dataset by a model that every rank loads. The ranks share the media."""

from stages import caption
from stages.artifacts.request import Request
from stages.execution.context import Context, Ranks


def run(request: Request, context: Context[Ranks]) -> dict[str, int]:
    """Write the files of :mod:`stages.caption`, with equal bytes on any number of ranks."""
    return caption.run(request, context)
