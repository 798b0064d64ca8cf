"""Videos that a guardrail refuses, noted without ending the call of the pipeline that made them."""

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
        """Return the frames after the check."""
        checked = self._check(frames)
        self._noted.append(checked is None)
        return np.zeros_like(frames) if checked is None else checked

    def taken(self) -> list[bool]:
        """Return whether each video since the last call was refused, in order, and forget it."""
        noted, self._noted = self._noted, []
        return noted


def refused(pipeline: Any, count: int) -> list[bool]:
    """Return which of the ``count`` videos of a stock pipeline's last call its guardrail, if any, refused."""
    check = getattr(getattr(pipeline, "safety_checker", None), "check_video_safety", None)
    noted = check.taken() if isinstance(check, Refusals) else []
    assert len(noted) in (0, count), "the pipeline checks every video once"
    return noted or [False] * count
