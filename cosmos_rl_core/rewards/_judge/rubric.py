"""Rubrics: the text of the question to a judge, and how the number is read in its answer."""

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.rewards._judge.service import by_key, by_pattern, within


class RubricOptions(RewardOptions):
    """Base of the ``Options`` of judges that are asked the recipe's own question."""

    criterion: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_]*$")
    """What the rubric asks about, in one word. It is part of the score's name, so that a recipe can have several
    judges: ``vlm_judge-anatomy``."""
    rubric: str = Field(min_length=1)
    """Text that is given after the pictures. ``{prompt}`` is replaced by the sample's prompt. It has to ask for the
    form that ``pattern`` or ``key`` reads."""
    pattern: str | None = None
    r"""Regular expression whose one group is the number in the answer, such as ``Score:\s*(\d+)``. Either this or
    ``key``."""
    key: str | None = Field(default=None, min_length=1)
    """Name of the number in an answer that is a JSON object. Either this or ``pattern``."""
    lowest: float
    """Lowest score of the rubric. An answer below it counts as unreadable."""
    highest: float
    """Highest score of the rubric. An answer above it counts as unreadable."""

    references: Literal["ignored", "taken", "needed"] = Field(
        default="ignored", json_schema_extra={"neutral": "ignored"}
    )
    """Whether the references of the prompt are shown before the sample. With ``needed`` a prompt without some is
    refused; with ``taken`` its sample is shown alone. The rubric has to say which pictures are what."""

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
    def _check_rubric(self) -> Self:
        if (self.pattern is None) == (self.key is None):
            raise ValueError("needs either pattern or key, to find the number in an answer")
        if self.lowest >= self.highest:
            raise ValueError(f"lowest = {self.lowest} is not below highest = {self.highest}")
        return self

    @property
    def uses_references(self) -> Literal["ignored", "taken", "needed"]:
        """Return the option ``references``."""
        return self.references

    @property
    def label(self) -> str:
        """Return a name that is unique among judges with other criteria: ``vlm_judge-anatomy``."""
        return "-".join(filter(None, [self.name, self.criterion]))

    @property
    def parser(self) -> str:
        """Return a text on how answers are read. It is part of the scorer's identity, and so differs for other ways."""
        how = f"pattern {self.pattern}" if self.key is None else f"key {self.key}"
        shown = "" if self.references == "ignored" else f", references {self.references}"
        return f"{how}, {self.lowest} to {self.highest}{shown}"

    def read(self, answer: str) -> dict[str, float]:
        """Return the number that an answer states, under the label.

        Raises ``UnreadableError`` if it states no number, or a number off the rubric's scale.
        """
        found = by_pattern(answer, self.pattern or "") if self.key is None else by_key(answer, self.key)
        return {self.label: within(found, self.lowest, self.highest)}
