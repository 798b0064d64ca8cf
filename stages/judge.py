"""Scores of generated samples by a reward with torch, which every rank loads. The ranks share the samples."""

from typing import Any

from stages import reward
from stages.artifacts.request import Request
from stages.execution.context import Context, Ranks


def run(request: Request, context: Context[Ranks]) -> dict[str, Any]:
    """Write the files of :mod:`stages.reward`, with equal bytes on any number of ranks."""
    return reward.run(request, context)
