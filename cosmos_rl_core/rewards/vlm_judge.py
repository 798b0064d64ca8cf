"""A score that a vision-language model states by a rubric, behind any OpenAI-compatible service."""

import re
from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from cosmos_rl_core.chat.service import ChatSettings
from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.rewards._facts import Facts
from cosmos_rl_core.rewards._judge import JudgeReward, by_key, by_pattern, within


class Options(ChatSettings, RewardOptions):
    """The service, its model, the rubric, and how its answers are read."""

    facts = Facts(
        scores={"vlm_judge": "the number that the judge states, from `lowest` to `highest`"},
        source="the recipe's rubric; the name is `vlm_judge-<criterion>` if it has a criterion",
        evidence="protocol",
    )
    name: Literal["vlm_judge"] = "vlm_judge"  # pyright: ignore[reportIncompatibleVariableOverride]
    criterion: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_]*$")
    """What the rubric asks about, in one word. It is part of the score's name, so that a recipe can have several
    judges: ``vlm_judge-anatomy``."""
    rubric: str = Field(min_length=1)
    """Text that is sent after the pictures. ``{prompt}`` stands for the sample's prompt. It has to ask for the form
    that ``pattern`` or ``key`` reads."""
    pattern: str | None = None
    r"""Regular expression whose one group is the number in the answer, such as ``Score:\s*(\d+)``. Either this or
    ``key``."""
    key: str | None = Field(default=None, min_length=1)
    """Name of the number in an answer that is a JSON object. Either this or ``pattern``."""
    lowest: float
    """Lowest score of the rubric. An answer below it counts as unreadable."""
    highest: float
    """Highest score of the rubric. An answer above it counts as unreadable."""

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, pattern: str | None) -> str | None:
        if pattern is None:
            return None
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"is no regular expression ({error})") from error
        if groups != 1:
            raise ValueError(f"has {groups} groups, expected one, with the number")
        return pattern

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.pattern is None) == (self.key is None):
            raise ValueError("needs either pattern or key, to find the number in an answer")
        if self.lowest >= self.highest:
            raise ValueError(f"lowest = {self.lowest} is not below highest = {self.highest}")
        return self

    @property
    def label(self) -> str:
        """Return a name that is unique among judges with other criteria: ``vlm_judge-anatomy``."""
        return "-".join(filter(None, [self.name, self.criterion]))


class Reward(JudgeReward):
    """Score under the options' label: the number that the judge states.

    An answer without it, or with one off the rubric's scale, is a failure of that sample.
    """

    def __init__(self, options: Options, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(options, environment)
        self._options, self.rubric = options, options.rubric
        how = f"pattern {options.pattern}" if options.key is None else f"key {options.key}"
        self.parser = f"{how}, {options.lowest} to {options.highest}"

    def scores(self, answer: str) -> dict[str, float]:
        """Return the number that an answer states. Raises ``UnreadableError`` if it states none."""
        options = self._options
        found = by_pattern(answer, options.pattern or "") if options.key is None else by_key(answer, options.key)
        return {options.label: within(found, options.lowest, options.highest)}
