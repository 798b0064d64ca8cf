"""Compressibility: how few bytes the picture needs as a JPEG. The plainest reward there is.

Source: DDPO, arXiv:2305.13301, section 5.1.
"""

import io
from importlib.metadata import version
from typing import Literal

import numpy as np
from PIL import Image
from pydantic import Field

from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.rewards._base import Sample


class Options(RewardOptions):
    """How the picture is compressed."""

    name: Literal["jpeg"] = "jpeg"  # pyright: ignore[reportIncompatibleVariableOverride]
    quality: int = Field(default=95, ge=1, le=100)
    """JPEG quality; higher notices finer detail."""


class Reward:
    """Score ``jpeg``: minus the size in kilobytes (1000 bytes), the mean over video frames."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.version = f"pillow {version('pillow')}"

    def check_prompt(self, text: str) -> str | None:
        """Any prompt will do."""
        return None

    def score(self, samples: list[Sample]) -> list[dict[str, float] | Exception]:
        """One score a sample; compressing does not fail."""
        return [{"jpeg": -float(np.mean(list(map(self._kilobytes, s.pixels))))} for s in samples]

    def _kilobytes(self, frame: np.ndarray) -> float:
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, format="JPEG", quality=self.options.quality)
        return len(buffer.getvalue()) / 1000
