"""Numbers in the summaries of scores, which are read without their tables."""

from stages.artifacts.manifest import Manifest

OVER_SAMPLES = 1
"""Last version of the scoring stages that took standard errors over samples; later versions take them over prompts."""


def known_error(scores: Manifest) -> float | None:
    """Return the standard error that a manifest of scores states; None if there is none.

    Version 1 took the samples of a prompt as independent: its errors are too small, and are not shown.
    """
    error = scores.summary.get("standard_error")
    return error if isinstance(error, float) and scores.version > OVER_SAMPLES else None
