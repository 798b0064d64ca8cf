"""Summaries of scores: means with standard errors, and the numbers that manifests have of tables."""

from dataclasses import dataclass
from typing import Any

from cosmos_rl_core.estimates.estimate import Estimate, mean_of
from cosmos_rl_core.rewards._base.answers import finite
from stages.artifacts.manifest import Manifest

OVER_SAMPLES = 1
"""Last version of the scoring stages that took standard errors over samples; later versions take them over prompts."""


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


def known_error(scores: Manifest) -> float | None:
    """Return the standard error that a manifest of scores states; None if there is none.

    Version 1 took the samples of a prompt as independent: its errors are too small, and are not shown.
    """
    error = scores.summary.get("standard_error")
    return error if isinstance(error, float) and scores.version > OVER_SAMPLES else None
