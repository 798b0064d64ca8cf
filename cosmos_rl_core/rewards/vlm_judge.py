"""A score that a vision-language model states by a rubric, behind any OpenAI-compatible service."""

from collections.abc import Mapping
from typing import Literal

from cosmos_rl_core.config.reward_facts import Facts
from cosmos_rl_core.rewards._judge.rubric import RubricOptions
from cosmos_rl_core.rewards._judge.service import JudgeOptions, JudgeReward


class Options(JudgeOptions, RubricOptions):
    """The service, its model, the rubric, and how its answers are read."""

    facts = Facts(
        scores={"vlm_judge": "the number that the judge states, from `lowest` to `highest`"},
        source="the recipe's rubric; the name is `vlm_judge-<criterion>` if it has a criterion",
        evidence="protocol",
    )
    name: Literal["vlm_judge"] = "vlm_judge"  # pyright: ignore[reportIncompatibleVariableOverride]


class Reward(JudgeReward):
    """Score under the options' label: the number that the judge states.

    A sample fails if its answer has no number, or a number off the rubric's scale.
    """

    def __init__(self, options: Options, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(options, environment)
        self._options, self.rubric, self.parser = options, options.rubric, options.parser

    def scores(self, answer: str) -> dict[str, float]:
        """Return the number that an answer states. Raises ``UnreadableError`` if it states none."""
        return self._options.read(answer)
