"""Similarity to the prompt's references, pixel by pixel: how much of a picture an edit leaves as it was.

It is 1 minus the mean absolute difference of pixels, each a number from 0 to 1.
"""

from typing import Literal

import numpy as np
from PIL import Image

from cosmos_rl_core.config.reward_facts import Facts
from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._base.packages import version
from cosmos_rl_core.rewards._base.pixels import no_reference


class Options(RewardOptions):
    """Settings of the comparison."""

    facts = Facts(
        scores={"pixel_similarity": "1 minus the mean absolute difference, in [0, 1]"},
        references="needed",
        evidence="real weights",
    )
    name: Literal["pixel_similarity"] = "pixel_similarity"  # pyright: ignore[reportIncompatibleVariableOverride]
    frames: Literal["first", "all"] = "all"
    """Frames of a video that are compared: the first, which image to video begins with, or each."""


class Reward:
    """Score ``pixel_similarity``: the mean over frames and references, each scaled to the size of the sample.

    Frames are compared with the last frame of a clip, after which the video goes on. With ``frames = "first"`` the
    first frame of the video is compared with the first frame of the clip that the reward gets.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.version = f"pillow {version('pillow')}"

    def check_prompt(self, prompt: Prompt) -> str | None:
        """Return None: every prompt with a reference can be scored."""
        return None

    def score(self, samples: list[Sample]) -> list[dict[str, float] | Exception]:
        """Return each sample's scores by name, or the error that says why it has none, in order."""
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> dict[str, float] | Exception:
        if not sample.references:
            return no_reference(sample)
        first = self.options.frames == "first"
        frames = sample.pixels[:1] if first else sample.pixels
        differences = [
            np.abs(frames.astype(np.float64) - _scaled(reference[0 if first else -1], frames.shape[1:3])).mean() / 255
            for reference in sample.references
        ]
        return {"pixel_similarity": 1.0 - float(np.mean(differences))}


def _scaled(picture: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    height, width = size
    return np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC), np.float64)
