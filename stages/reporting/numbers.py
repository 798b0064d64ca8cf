"""Numbers, and limits that tripped, in words for people. Imports nothing heavy, because commands print them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


def number(value: float | None) -> str:
    """Format with four significant digits, a whole number with all; None, NaN and infinity become a dash."""
    if value is None or not math.isfinite(value):
        return "–"
    return (str(value) if isinstance(value, int) else f"{value:.4g}").replace("-", "−")


def signed(value: float) -> str:
    """Format like :func:`number`, with a plus sign unless negative."""
    return number(value) if value < 0 or not math.isfinite(value) else f"+{number(value)}"


@dataclass(frozen=True)
class Estimate:
    """A mean over ``n`` samples and its standard error; both are NaN if there are too few samples."""

    mean: float
    error: float
    n: int

    @classmethod
    def of(cls, scores: Any, prompts: Any | None = None) -> "Estimate":
        """Estimate the mean of the finite scores of a pandas Series.

        With ``prompts``, a Series with the same index, the standard error is that of the means of the prompts, whose
        samples are alike; with a single prompt it is that of the samples.
        """
        known = scores.dropna()
        means = known if prompts is None else known.groupby(prompts.reindex(known.index)).mean()
        independent = means if len(means) > 1 else known
        return cls(float(known.mean()), float(independent.sem()), len(known))

    @property
    def shown(self) -> str:
        """Return the mean, to two significant digits of the error."""
        decimals = self._decimals
        return number(self.mean) if decimals is None else f"{self.mean:.{decimals}f}".replace("-", "−")

    @property
    def error_shown(self) -> str:
        """Return the error as ``± 0.012``; empty if there is none."""
        decimals = 0 if self.error == 0 else self._decimals
        return "" if decimals is None else f"± {self.error:.{decimals}f}"

    @property
    def direction(self) -> str:
        """Return ``rose`` or ``fell`` beyond two standard errors, otherwise ``did not clearly change``."""
        if not math.isfinite(self.error) or abs(self.mean) <= 2 * self.error:
            return "did not clearly change"
        return "rose" if self.mean > 0 else "fell"

    def __str__(self) -> str:
        return f"{self.shown} {self.error_shown}".rstrip()

    @property
    def _decimals(self) -> int | None:
        """Return how many decimals the error allows; None without an error."""
        has_error = math.isfinite(self.error) and self.error > 0
        return min(6, max(0, 1 - math.floor(math.log10(self.error)))) if has_error else None


def words(row: Mapping[str, Any]) -> str:
    """Return a row of ``tripped`` of the evidence as a sentence.

    Such as ``luma of pixel_statistics rose from 0.4 to 0.6 (z-score +2.1), by 7.3 standard errors; rise = 6``.
    """
    score = row["score"] if row["score"] == row["reward"] else f"{row['score']} of {row['reward']}"
    bound, now, limit, z = row["bound"], number(row["mean"]), number(row["limit"]), z_score(row["z"])
    if bound in ("below", "above"):
        return f"{score} is {now}, {bound} the limit of {limit} (iteration 0: {number(row['first'])}, z-score {z})"
    how = "fell" if bound == "fall" else "rose"
    # All samples of iteration 0 had one value.
    drift = "infinitely many" if row["drift"] is None else number(abs(row["drift"]))
    change = f"{how} from {number(row['first'])} to {now} (z-score {z})"
    return f"{score} {change}, by {drift} standard errors; {bound} = {limit}"


def z_score(z: float | None) -> str:
    """Format a z-score with its sign; a dash if there is none."""
    return "\u2013" if z is None else signed(z)
