"""A rating of alignment and quality by UnifiedReward, a judge of images, behind an OpenAI-compatible service."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from cosmos_rl_core.chat.service import ChatSettings
from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.rewards._facts import Facts
from cosmos_rl_core.rewards._judge import JudgeReward, by_pattern, within

# The model knows this wording; another one asks for another number.
RUBRIC = (
    "<image>\n"
    "You are given a text caption and a generated image based on that caption. Your task is to evaluate this image "
    "based on two key criteria:\n"
    "1. Alignment with the Caption: Assess how well this image aligns with the provided caption. Consider the accuracy "
    "of depicted objects, their relationships, and attributes as described in the caption.\n"
    "2. Overall Image Quality: Examine the visual quality of this image, including clarity, detail preservation, color "
    "accuracy, and overall aesthetic appeal.\n"
    "Based on the above criteria, assign a score from 1 to 5 after 'Final Score:'.\n"
    "Your task is provided as follows:\n"
    "Text Caption: [{prompt}]"
)
PATTERN = r"Final Score:\s*(-?[0-9]+(?:\.[0-9]+)?)"
LOWEST, HIGHEST = 1.0, 5.0


class Options(ChatSettings, RewardOptions):
    """The service, and its name of the model."""

    facts = Facts(
        input="image",
        scores={"unified_reward": "the judge's 1 to 5, divided by 5: 0.2 to 1"},
        source="UnifiedReward, arXiv:2503.05236, with the pointwise question of flow_grpo; of a video, frames are sent",
        evidence="protocol",
    )
    name: Literal["unified_reward"] = "unified_reward"  # pyright: ignore[reportIncompatibleVariableOverride]
    model: str = Field(default="UnifiedReward-7b-v1.5", min_length=1)
    """The service's name of the model."""


class Reward(JudgeReward):
    """Score ``unified_reward``: the judge's "Final Score" from 1 to 5, divided by 5.

    An answer without it, or with one off this scale, is a failure of that sample.
    """

    rubric, parser = RUBRIC, f"{PATTERN}, {LOWEST} to {HIGHEST}, divided by {HIGHEST}"

    def __init__(self, options: Options, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(options, environment)

    def scores(self, answer: str) -> dict[str, float]:
        """Return the score that an answer states. Raises ``UnreadableError`` if it states none."""
        return {"unified_reward": within(by_pattern(answer, PATTERN), LOWEST, HIGHEST) / HIGHEST}
