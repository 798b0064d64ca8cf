"""A rating of alignment and quality by UnifiedReward, a judge of images, behind an OpenAI-compatible service."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import Field

from cosmos_rl_core.config.base import NOT_IDENTITY, UserPath
from cosmos_rl_core.config.reward_facts import Facts
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards._judge.service import PROMPT, JudgeOptions, JudgeReward, by_pattern, within

PATTERN = r"Final Score:\s*(-?[0-9]+(?:\.[0-9]+)?)"
LOWEST, HIGHEST = 1.0, 5.0


class Options(JudgeOptions):
    """The service, the model and the file with its question."""

    facts = Facts(
        input="image",
        scores={"unified_reward": "the judge's 1 to 5, divided by 5: 0.2 to 1"},
        source="UnifiedReward, arXiv:2503.05236, asked the pointwise question in a file; of a video, frames are sent",
        evidence="protocol",
    )
    name: Literal["unified_reward"] = "unified_reward"  # pyright: ignore[reportIncompatibleVariableOverride]
    model: str = Field(default="UnifiedReward-7b-v1.5", min_length=1)
    """The service's name of the model."""
    rubric_file: UserPath = Field(min_length=1, json_schema_extra=NOT_IDENTITY)
    """File with the question that the model was trained with, and ``{prompt}`` in place of the prompt; the model's page
    has it. Scores depend on its text, not on its path."""


class Reward(JudgeReward):
    """Score ``unified_reward``: the judge's "Final Score" from 1 to 5, divided by 5.

    A sample fails if the answer has no such number, or a number off this scale.
    """

    parser = f"{PATTERN}, {LOWEST} to {HIGHEST}, divided by {HIGHEST}"

    def __init__(self, options: Options, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(options, environment)
        self._path = options.rubric_file

    @cached_property
    def rubric(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the text of the file. Raises :class:`ConfigError` unless it has ``{prompt}`` exactly once."""
        try:
            text = Path(self._path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"rubric_file = {self._path!r} cannot be read: {error}") from error
        if text.count(PROMPT) != 1:
            raise ConfigError(f"rubric_file = {self._path!r} has {PROMPT} {text.count(PROMPT)} times, expected once")
        return text

    def scores(self, answer: str) -> dict[str, float]:
        """Return the score that an answer states. Raises ``UnreadableError`` if it states none."""
        return {"unified_reward": within(by_pattern(answer, PATTERN), LOWEST, HIGHEST) / HIGHEST}
