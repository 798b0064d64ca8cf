"""Standard errors of means, ratios and changes: the one place that makes them.

Values of one prompt, medium or conversation are alike: they form a *cluster*, and only clusters are independent. With
the ratio ``R = sum(a) / sum(b)``, of which a mean is the case ``b = 1``, a cluster ``c`` moves it by about
``u_c = (a_c - R b_c) / sum(b)``, its *influence*. The standard error is ``sqrt(C / (C - 1) sum(u_c^2))`` over ``C``
clusters; if clusters have equal size, it is the standard error of the mean of cluster means. The error of a change is
computed in the same way from ``u_c(after) - u_c(before)``. So clusters that both sides have are paired, clusters of one
side alone are independent, and the change is the difference of the two ratios that are printed.
Source: linearised ratio estimator, Cochran, *Sampling Techniques*, third edition, section 6.4, and section 9A.2 for
clusters.

One cluster does not show how clusters differ, so its mean has no error. A missing error is NaN here, ``null`` in JSON
and left out in print; it is never 0 or infinite.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cosmos_rl_core.estimates.digits import number

FEWEST = 4
"""Fewest clusters for a decision by the error. Fewer hardly show how clusters differ: their error is only printed."""


@dataclass(frozen=True)
class Estimate:
    """A mean of ``n`` values, or a ratio, and its standard error; NaN where there are too few values or clusters."""

    mean: float
    error: float
    n: int
    clusters: int
    """Number of prompts, media or conversations, which are independent of each other."""

    @classmethod
    def missing(cls) -> "Estimate":
        """Return the estimate without values: its mean and error are NaN."""
        return cls(math.nan, math.nan, 0, 0)

    def minus(self, before: "Estimate") -> "Estimate":
        """Return this estimate minus ``before``, whose clusters must be independent of this one's."""
        error = math.hypot(self.error, before.error)
        clusters = min(self.clusters, before.clusters)
        return Estimate(self.mean - before.mean, error, min(self.n, before.n), clusters)

    def by_chance(self, means: Sequence[float]) -> "Estimate":
        """Return this difference between a run and the mean of other runs, with the error of chance added.

        ``means`` are the means of the other runs, which differ by chance alone. Their variance counts once for the run
        itself, which would vary like them if there were no difference, and once for the mean of the others. The error
        is NaN with a single other run.
        """
        spread = float(np.std(means, ddof=1)) * math.sqrt(1 + 1 / len(means)) if len(means) > 1 else math.nan
        return Estimate(self.mean, math.hypot(self.error, spread), self.n, self.clusters)

    @property
    def decides(self) -> bool:
        """Return whether there are enough clusters to decide by the error."""
        return self.clusters >= FEWEST and math.isfinite(self.error)

    @property
    def in_errors(self) -> float:
        """Return the mean over its standard error: infinite if only the error is 0; NaN unless :attr:`decides`."""
        if not self.decides or math.isnan(self.mean):
            return math.nan
        return scaled(self.mean, self.error)

    @property
    def direction(self) -> str:
        """Return ``rose`` or ``fell`` beyond two standard errors, otherwise ``did not clearly change``."""
        if not abs(self.in_errors) > 2:
            return "did not clearly change"
        return "rose" if self.mean > 0 else "fell"

    @property
    def shown(self) -> str:
        """Return the mean as text, rounded to two significant digits of the error."""
        decimals = self._decimals
        return number(self.mean) if decimals is None else f"{self.mean:.{decimals}f}".replace("-", "−")

    @property
    def error_shown(self) -> str:
        """Return the error as ``± 0.012``; empty if there is none."""
        decimals = 0 if self.error == 0 else self._decimals
        return "" if decimals is None else f"± {self.error:.{decimals}f}"

    def __str__(self) -> str:
        return f"{self.shown} {self.error_shown}".rstrip()

    @property
    def _decimals(self) -> int | None:
        """Return the number of decimals that show two digits of the error; None without an error."""
        has_error = math.isfinite(self.error) and self.error > 0
        return min(6, max(0, 1 - math.floor(math.log10(self.error)))) if has_error else None


def scaled(moved: float, scale: float | None) -> float:
    """Return ``moved / scale``: infinite if only ``scale`` is 0; NaN if either is not known."""
    if scale is None or math.isnan(scale) or math.isnan(moved):
        return math.nan
    if moved == 0:
        return 0.0
    return moved / scale if scale else math.copysign(math.inf, moved)


@dataclass(frozen=True)
class Sums:
    """Numerators and denominators of a ratio, summed within clusters: ``[C]`` float64 each, and the clusters' names."""

    names: np.ndarray
    numerators: np.ndarray
    """Sums of numerators minus ``origin`` times the denominators, so that a mean of equal values has an error of
    exactly 0."""
    denominators: np.ndarray
    origin: float
    n: int

    @classmethod
    def of(cls, values: Any, clusters: Any, weights: Any | None = None) -> "Sums":
        """Sum ``values`` ``[n]`` within their ``clusters`` ``[n]``, for the mean of values.

        With ``weights`` ``[n]``, the denominators, :meth:`estimate` is the ratio of the sum of values to the sum of
        weights. Values of NaN are left out.
        """
        numerators = np.asarray(values, dtype=np.float64)
        known = ~np.isnan(numerators)
        numerators = numerators[known]
        named = np.asarray(clusters).astype(str)[known]
        denominators = np.ones(len(numerators)) if weights is None else np.asarray(weights, dtype=np.float64)[known]
        origin = float(numerators[0]) if weights is None and len(numerators) else 0.0
        names, of = np.unique(named, return_inverse=True)
        with np.errstate(invalid="ignore"):
            above = np.bincount(of, numerators - origin * denominators, len(names))
        return cls(names, above, np.bincount(of, denominators, len(names)), origin, len(numerators))

    @property
    def estimate(self) -> Estimate:
        """Return the ratio and its standard error."""
        return Estimate(self._ratio, _length(self._influences), self.n, len(self.names))

    def change_to(self, after: "Sums") -> Estimate:
        """Return the ratio of ``after`` minus this ratio, and the standard error of the difference.

        ``n`` and ``clusters`` come from the smaller side.
        """
        union = np.union1d(self.names, after.names)
        moved = np.zeros(len(union))
        for side, sign in ((after, 1.0), (self, -1.0)):
            moved[np.searchsorted(union, side.names)] += sign * side._influences
        short = min(len(self.names), len(after.names))
        error = _length(moved) if short > 1 else math.nan
        return Estimate(after._ratio - self._ratio, error, min(self.n, after.n), short)

    @property
    def _ratio(self) -> float:
        if not self.n or not np.isfinite(self.numerators).all():
            return math.nan
        return self.origin + float(self.numerators.sum() / self.denominators.sum())

    @property
    def _influences(self) -> np.ndarray:
        """Return the influence of each cluster, ``[C]``, times ``sqrt(C / (C - 1))``; NaN if there is only one."""
        count = len(self.names)
        if count < 2 or not np.isfinite(self.numerators).all():
            return np.full(count, np.nan)
        total = self.denominators.sum()
        above = self.numerators - self.numerators.sum() / total * self.denominators
        return above / total * math.sqrt(count / (count - 1))


class Compared(NamedTuple):
    """One number in two artifacts, each as the sums of its ratio."""

    name: str
    sums: tuple[Sums, Sums]
    how: str
    """How the two are paired, such as ``item by item``."""


def _length(influences: np.ndarray) -> float:
    return float(np.sqrt(np.square(influences).sum())) if len(influences) else math.nan


def mean_of(values: Any, clusters: Any) -> Estimate:
    """Return the mean of ``values`` ``[n]`` and its standard error over ``clusters`` ``[n]``; NaN is left out."""
    return Sums.of(values, clusters).estimate


def mean_of_independent(values: Any) -> Estimate:
    """Return the mean of independent values ``[n]``, such as one per run, and its standard error; NaN is left out."""
    return mean_of(values, np.arange(len(values)))


def mean_of_estimates(estimates: Sequence[Estimate]) -> Estimate:
    """Return the unweighted mean of independent estimates, with an error from their errors.

    Iterations with different prompts are independent. Estimates without a mean are left out; if one has no error, the
    mean has none.
    """
    known = [one for one in estimates if math.isfinite(one.mean)]
    if not known:
        return Estimate.missing()
    mean, error = math.fsum(one.mean for one in known) / len(known), math.hypot(*(one.error for one in known))
    counts = sum(one.n for one in known), sum(one.clusters for one in known)
    return Estimate(mean, error / len(known), *counts)


def mean_of_sums(sides: Sequence[Sums]) -> Estimate:
    """Return the unweighted mean of ratios, such as one per iteration, and its standard error.

    A cluster that several ratios have counts as one; if no two ratios share a cluster, the error equals the error of
    :func:`mean_of_estimates`. Ratios without values are left out; if one has a single cluster, the mean has no error.
    """
    known = [one for one in sides if math.isfinite(one._ratio)]
    if not known:
        return Estimate.missing()
    mean = math.fsum(one._ratio for one in known) / len(known)
    names, of = np.unique(np.concatenate([one.names for one in known]), return_inverse=True)
    moved = np.bincount(of, np.concatenate([one._influences for one in known]), len(names)) / len(known)
    return Estimate(mean, _length(moved), sum(one.n for one in known), len(names))
