"""A guardrail's refusals of videos, noted so that they do not end the call of the pipeline that made the videos."""

from collections.abc import Callable
from typing import Any

import numpy as np

Check = Callable[[np.ndarray], np.ndarray | None]
"""Returns uint8 RGB frames ``[frames, height, width, 3]``, maybe with other pixels, or None to refuse them."""


class Refusals:
    """A guardrail's check of videos that replaces each refused video by a black one, and notes it."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._noted: list[bool] = []

    def __call__(self, frames: np.ndarray) -> np.ndarray:
        """Return the checked frames, black ones if the check refuses them."""
        checked = self._check(frames)
        self._noted.append(checked is None)
        return np.zeros_like(frames) if checked is None else checked

    def taken(self) -> list[bool]:
        """Return for each video checked since the last call whether it was refused, in order, and clear the notes."""
        noted, self._noted = self._noted, []
        return noted


def refused(pipeline: Any, count: int) -> list[bool]:
    """Return for each of the ``count`` videos of a stock pipeline's last call whether its guardrail refused it.

    All are False for a pipeline without a guardrail.
    """
    check = getattr(getattr(pipeline, "safety_checker", None), "check_video_safety", None)
    noted = check.taken() if isinstance(check, Refusals) else []
    assert len(noted) in (0, count), "the pipeline checks every video once"
    return noted or [False] * count
