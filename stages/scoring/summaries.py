"""Numbers that the summaries of scores state, read without tables."""

from stages.artifacts.manifest import Manifest

OVER_SAMPLES = 1
"""Newest version of the stages that score whose standard errors are over samples."""


def known_error(scores: Manifest) -> float | None:
    """Return the standard error that a manifest of scores states; None if there is none.

    Version 1 took the samples of a prompt as independent: its errors are too small, and are not shown.
    """
    error = scores.summary.get("standard_error")
    return error if isinstance(error, float) and scores.version > OVER_SAMPLES else None
