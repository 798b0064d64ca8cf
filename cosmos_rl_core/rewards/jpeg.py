"""Compressibility: minus the size of the image as a JPEG file.

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
from cosmos_rl_core.rewards._facts import Facts


class Options(RewardOptions):
    """Settings of the compression."""

    facts = Facts(
        scores={"jpeg": "minus kilobytes, below 0"},
        source="DDPO, arXiv:2305.13301, section 5.1",
        evidence="real weights",
    )
    name: Literal["jpeg"] = "jpeg"  # pyright: ignore[reportIncompatibleVariableOverride]
    quality: int = Field(default=95, ge=1, le=100)
    """JPEG quality, 1 to 100. A higher quality is more sensitive to fine detail."""


class Reward:
    """Score ``jpeg``: minus the size in kilobytes (1000 bytes), averaged over video frames."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.version = f"pillow {version('pillow')}"

    def check_prompt(self, text: str) -> str | None:
        """Return None: every prompt can be scored."""
        return None

    def score(self, samples: list[Sample]) -> list[dict[str, float] | Exception]:
        """Return a score for each sample, in order."""
        return [{"jpeg": -float(np.mean(list(map(self._kilobytes, s.pixels))))} for s in samples]

    def _kilobytes(self, frame: np.ndarray) -> float:
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, format="JPEG", quality=self.options.quality)
        return len(buffer.getvalue()) / 1000
