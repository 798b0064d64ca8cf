"""Compressibility: the size of the image as a JPEG file, in either direction.

Source: DDPO, arXiv:2305.13301, section 5.1.
"""

import io
from typing import Literal

import numpy as np
from PIL import Image
from pydantic import Field

from cosmos_rl_core.config.reward_facts import Facts
from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._base.packages import version


class Options(RewardOptions):
    """Settings of the compression."""

    facts = Facts(
        scores={
            "jpeg": "what `score` names: minus kilobytes, below 0, by default",
            "jpeg_incompressibility": "kilobytes, above 0",
            "jpeg_compressibility": "minus kilobytes / 500, below 0",
        },
        source="DDPO, arXiv:2305.13301, section 5.1; the long names and their scales come from flow_grpo",
        also=("jpeg_incompressibility", "jpeg_compressibility"),
        evidence="real weights",
    )
    name: Literal["jpeg"] = "jpeg"  # pyright: ignore[reportIncompatibleVariableOverride]
    quality: int = Field(default=95, ge=1, le=100)
    """JPEG quality, 1 to 100. A higher quality is more sensitive to fine detail."""
    score: Literal["jpeg", "jpeg_compressibility", "jpeg_incompressibility"] = Field(
        default="jpeg", json_schema_extra={"neutral": "jpeg"}
    )
    """The score ``jpeg``: minus kilobytes; the same divided by 500 (``jpeg_compressibility``); or kilobytes, which
    rewards detail (``jpeg_incompressibility``)."""


class Reward:
    """Score ``jpeg`` by the size in kilobytes (1000 bytes), averaged over video frames. By default, small is good."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.version = f"pillow {version('pillow')}"

    def check_prompt(self, prompt: Prompt) -> str | None:
        """Return None: every prompt can be scored."""
        return None

    def score(self, samples: list[Sample]) -> list[dict[str, float] | Exception]:
        """Return the scores of each sample, in order."""
        return [self._scores(float(np.mean(list(map(self._kilobytes, s.pixels))))) for s in samples]

    def _scores(self, kilobytes: float) -> dict[str, float]:
        found = {
            "jpeg": -kilobytes,
            "jpeg_incompressibility": kilobytes,
            "jpeg_compressibility": -kilobytes / 500,
        }
        return found | {"jpeg": found[self.options.score]}

    def _kilobytes(self, frame: np.ndarray) -> float:
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, format="JPEG", quality=self.options.quality)
        return len(buffer.getvalue()) / 1000
