"""Choice of the frames that are taken from a medium. This module reads no file."""

import math
from typing import NamedTuple

from cosmos_rl_core.datasets._base import ItemError


class Windows(NamedTuple):
    """Number of clips that a medium gives, and their frames."""

    frames: int
    """Number of frames of a clip."""
    clips: int = 1
    """Number of clips. The first starts at the beginning, the last ends at the end, the others are evenly spaced."""
    fps: float | None = None
    """Frames a second of a clip, chosen among the file's frames; None takes every frame."""

    def indices(self, frames: int, fps: float) -> list[list[int]]:
        """Return the indices of the frames of each clip of a medium with ``frames`` frames at ``fps``.

        Raises :class:`ItemError` if there are too few.
        """
        step = self._step(fps)
        room = _taken(frames, step) - self.frames
        if room < self.clips - 1:
            raise ItemError(f"{frames} frames, expected at least {self.least(fps)}")
        starts = [window * room // (self.clips - 1) for window in range(self.clips)] if self.clips > 1 else [0]
        return [[math.floor((start + k) * step) for k in range(self.frames)] for start in starts]

    def least(self, fps: float) -> int:
        """Return the fewest frames that a medium at ``fps`` needs."""
        step, taken = self._step(fps), self.frames + self.clips - 1
        about = math.ceil((taken - 1) * step) + 1
        # The quotient is rounded, so that one frame more or less may be needed.
        return next(frames for frames in range(about - 1, about + 2) if _taken(frames, step) >= taken)

    def _step(self, fps: float) -> float:
        """Return the distance between neighbouring frames of a clip, in frames of the medium."""
        return fps / self.fps if self.fps is not None and fps > 0 else 1.0


def _taken(frames: int, step: float) -> int:
    """Return the number of frames, ``step`` apart, that a medium of ``frames`` frames gives."""
    return math.floor((frames - 1) / step) + 1
