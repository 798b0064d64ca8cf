"""Judgement of an edit by a vision-language model behind a service.

The model sees the references of the prompt and then the result. It rates, each from 0 to 10, whether the instruction
was followed and whether the rest is unchanged. The score is the square root of the product of both ratings, so it is 0
if one of them is 0: a copy of the reference scores 0.

Source: VIEScore, arXiv:2312.14867, which asks the same two questions about edits. It takes the lower rating, and the
square root of its product with the quality of the picture. The quality is not asked about here.
"""

import math
from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from cosmos_rl_core.config.reward_facts import Facts
from cosmos_rl_core.errors import counted
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._judge.service import PROMPT, JudgeOptions, JudgeReward, by_key, within

LOWEST, HIGHEST = 0.0, 10.0
KEYS = ("followed", "unchanged")
"""Names of the two ratings, in the judge's answer and among the scores."""
PICTURES = "You see first {before} from before an edit, then {after} of its result."
RUBRIC = """The instruction of the edit: {prompt}

Rate two things, each with a number from 0 to 10:
"followed": does the result do what the instruction says? 0: nothing of it is done. 10: all of it is done.
"unchanged": is all that the instruction does not name as it was? 0: it is another picture. 10: nothing else differs.

Answer with a JSON object alone: {"followed": NUMBER, "unchanged": NUMBER}"""


class Options(JudgeOptions):
    """The service, its model, and the question."""

    facts = Facts(
        scores={
            "edit_judge": "root of the product of the two others, 0 to 10",
            "followed": "whether the instruction was followed, 0 to 10",
            "unchanged": "whether the rest is as it was, 0 to 10",
        },
        source="the two questions that VIEScore, arXiv:2312.14867, asks about edits, by their geometric mean",
        references="needed",
        evidence="protocol",
    )
    name: Literal["edit_judge"] = "edit_judge"  # pyright: ignore[reportIncompatibleVariableOverride]
    rubric: str = Field(default=RUBRIC, min_length=1)
    """Text that is given after the pictures and a sentence on their numbers. ``{prompt}`` is replaced by the sample's
    prompt. It has to ask for a JSON object with the numbers ``followed`` and ``unchanged``, from 0 to 10."""


class Reward(JudgeReward):
    """Score ``edit_judge``, and the two ratings that it is computed from.

    A sample fails if the answer lacks one of both numbers, if a number is off the scale, or if the prompt has no
    references.
    """

    parser = f"{PICTURES} keys {', '.join(KEYS)}, {LOWEST} to {HIGHEST}, root of their product"

    def __init__(self, options: Options, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(options, environment)
        self.rubric = options.rubric

    def asked(self, sample: Sample) -> str:
        """Return a sentence with the numbers of pictures before and after the edit, then the rubric."""
        numbers = [counted(len(some), "picture") for some in (self.before(sample), self.chosen(sample))]
        return f"{PICTURES.format(before=numbers[0], after=numbers[1])}\n{self.rubric.replace(PROMPT, sample.prompt)}"

    def scores(self, answer: str) -> dict[str, float]:
        """Return the scores of an answer by name. Raises ``UnreadableError`` if it lacks one of both ratings."""
        followed, unchanged = (within(by_key(answer, key), LOWEST, HIGHEST) for key in KEYS)
        return {"edit_judge": math.sqrt(followed * unchanged), "followed": followed, "unchanged": unchanged}
