"""Scores of samples as tables, and their means with standard errors."""

import json
from dataclasses import dataclass
from typing import Any

import pandas as pd

from cosmos_rl_core.estimates.estimate import Estimate, mean_of
from cosmos_rl_core.rewards._base.answers import finite
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.formats.tables import read_table


@dataclass(frozen=True)
class Spread:
    """A score of some samples: its mean with the standard error over prompts, and its deviation over samples."""

    estimate: Estimate
    deviation: float
    """NaN with fewer than two samples."""

    @classmethod
    def of(cls, scores: Any, prompts: Any) -> "Spread":
        """Return the spread of scores. ``scores`` and ``prompts`` are Series with one entry per sample."""
        return cls(mean_of(scores, prompts), float(scores.std()))

    @property
    def mean(self) -> float:
        """Return the mean; NaN without samples."""
        return self.estimate.mean

    def as_json(self) -> dict[str, Any]:
        """Return the numbers; a number that is not finite is None."""
        found = self.estimate
        numbers = {"mean": found.mean, "deviation": self.deviation, "error": found.error}
        return {"n": found.n, "prompts": found.clusters} | {name: finite(value) for name, value in numbers.items()}


def scored_numbers(label: str, artifact: Artifact) -> Any:
    """Return a table of the scored samples, by id: ``prompt_id``, and every finite number that the reward gave."""
    table = read_table(artifact, contracts.Reward.SCORES).set_index("sample_id")
    table = table[table["valid"]]
    details = read_table(artifact, contracts.Reward.ANSWERS).set_index("sample_id")["details"]
    rows = [_numbers(str(details[sample])) for sample in table.index]
    found = pd.DataFrame(rows, index=table.index, dtype="float64")
    return found.assign(**{label: table["score"].astype("float64"), "prompt_id": table["prompt_id"]})


def _numbers(details: str) -> dict[str, float]:
    return {name: number for name, value in json.loads(details).items() if (number := finite(value)) is not None}
