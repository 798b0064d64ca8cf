"""Scores of samples as tables, and their means with standard errors."""

import json
from dataclasses import dataclass
from typing import Any

import pandas as pd

from cosmos_rl_core.rewards._answers import finite
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.formats.tables import read_table
from stages.reporting.numbers import Estimate


@dataclass(frozen=True)
class Spread:
    """Mean, standard deviation over samples, and standard error of a score; NaN where there are too few samples."""

    n: int
    mean: float
    deviation: float
    error: float

    @classmethod
    def of(cls, scores: Any, prompts: Any) -> "Spread":
        """Return the spread of a Series of scores of samples of these prompts.

        Samples of one prompt are alike, so the standard error is that of the prompts' means. With one prompt it is that
        of the samples.
        """
        estimate = Estimate.of(scores, prompts)
        return cls(len(scores), estimate.mean, float(scores.std()), estimate.error)

    def as_json(self) -> dict[str, Any]:
        """Return the numbers; those that are not finite are None."""
        return {"n": self.n} | {name: finite(getattr(self, name)) for name in ("mean", "deviation", "error")}


def scored_numbers(label: str, artifact: Artifact) -> Any:
    """Return a table of the samples that were scored: ``prompt_id``, and every finite number that the reward gave."""
    table = read_table(artifact, contracts.Reward.SCORES).set_index("sample_id")
    table = table[table["valid"]]
    details = read_table(artifact, contracts.Reward.ANSWERS).set_index("sample_id")["details"]
    rows = [_numbers(str(details[sample])) for sample in table.index]
    found = pd.DataFrame(rows, index=table.index, dtype="float64")
    return found.assign(**{label: table["score"].astype("float64"), "prompt_id": table["prompt_id"]})


def _numbers(details: str) -> dict[str, float]:
    return {name: number for name, value in json.loads(details).items() if (number := finite(value)) is not None}
