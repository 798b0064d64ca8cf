"""Standard errors of means, ratios and changes: the one place that makes them.

Values of one prompt, medium or conversation are alike: they form a *cluster*, and only clusters are independent. With
the ratio ``R = sum(a) / sum(b)``, of which a mean is the case ``b = 1``, a cluster ``c`` moves it by about
``u_c = (a_c - R b_c) / sum(b)``, its *influence*. The standard error is ``sqrt(C / (C - 1) sum(u_c^2))`` over ``C``
clusters: with clusters of equal size the standard error of the mean of their means. The error of a change is made alike
from ``u_c(after) - u_c(before)``. So clusters that both sides have are paired, clusters of one side alone are
independent, and the change is the difference of the two ratios that are printed.
Source: linearised ratio estimator, Cochran, *Sampling Techniques*, third edition, section 6.4, and section 9A.2 for
clusters.

One cluster tells nothing of how clusters differ: its mean has no error. NaN says so here, ``null`` in JSON, and nothing
in print; it is never 0 nor infinite.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cosmos_rl_core.estimates.digits import number

FEWEST = 4
"""Clusters below which an error is printed, but decides nothing: so few hardly tell how far clusters differ."""


@dataclass(frozen=True)
class Estimate:
    """A mean of ``n`` values, or a ratio, and its standard error; NaN where there are too few values or clusters."""

    mean: float
    error: float
    n: int
    clusters: int
    """Prompts, media or conversations, which are independent of each other."""

    @classmethod
    def missing(cls) -> "Estimate":
        """Return the estimate of nothing."""
        return cls(math.nan, math.nan, 0, 0)

    def minus(self, before: "Estimate") -> "Estimate":
        """Return the change since an estimate of clusters that have nothing to do with these."""
        error = math.hypot(self.error, before.error)
        clusters = min(self.clusters, before.clusters)
        return Estimate(self.mean - before.mean, error, min(self.n, before.n), clusters)

    def by_chance(self, means: Sequence[float]) -> "Estimate":
        """Return this difference of a run from the mean of others with the error of chance added.

        The others have the ``means``, which differ by chance alone. Their variance counts once for the run, which is
        like them if there is no difference, and once for their mean. The error is NaN with a single one.
        """
        spread = float(np.std(means, ddof=1)) * math.sqrt(1 + 1 / len(means)) if len(means) > 1 else math.nan
        return Estimate(self.mean, math.hypot(self.error, spread), self.n, self.clusters)

    @property
    def decides(self) -> bool:
        """Return whether there are clusters enough to judge by the error."""
        return self.clusters >= FEWEST and math.isfinite(self.error)

    @property
    def in_errors(self) -> float:
        """Return the mean in standard errors: infinite if the error is 0 and the mean is not; NaN if it decides
        nothing."""
        if not self.decides or math.isnan(self.mean):
            return math.nan
        return in_units(self.mean, self.error)

    @property
    def direction(self) -> str:
        """Return ``rose`` or ``fell`` beyond two standard errors, otherwise ``did not clearly change``."""
        if not abs(self.in_errors) > 2:
            return "did not clearly change"
        return "rose" if self.mean > 0 else "fell"

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

    def __str__(self) -> str:
        return f"{self.shown} {self.error_shown}".rstrip()

    @property
    def _decimals(self) -> int | None:
        """Return how many decimals the error allows; None without an error."""
        has_error = math.isfinite(self.error) and self.error > 0
        return min(6, max(0, 1 - math.floor(math.log10(self.error)))) if has_error else None


def in_units(moved: float, unit: float | None) -> float:
    """Return ``moved`` in units: infinite if the unit is 0 and something moved; NaN if either is not known."""
    if unit is None or math.isnan(unit) or math.isnan(moved):
        return math.nan
    if moved == 0:
        return 0.0
    return moved / unit if unit else math.copysign(math.inf, moved)


@dataclass(frozen=True)
class Sums:
    """Numerators and denominators of a ratio, summed within clusters; ``[C]`` each, by the names of the clusters."""

    names: np.ndarray
    numerators: np.ndarray
    """Above ``origin`` times the denominators, so that a mean of equal values has an error of exactly 0."""
    denominators: np.ndarray
    origin: float
    n: int

    @classmethod
    def of(cls, values: Any, clusters: Any, weights: Any | None = None) -> "Sums":
        """Return the sums of ``values`` ``[n]`` with the names of their ``clusters`` ``[n]``, for the mean of values.

        With ``weights`` ``[n]``, the denominators, it is for the ratio of both sums. Values of NaN are left out.
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
        """Return the difference of both ratios, after minus before, and its standard error.

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
        """Return how far each cluster moves the ratio, ``[C]``, times ``sqrt(C / (C - 1))``; NaN for one cluster."""
        count = len(self.names)
        if count < 2 or not np.isfinite(self.numerators).all():
            return np.full(count, np.nan)
        total = self.denominators.sum()
        above = self.numerators - self.numerators.sum() / total * self.denominators
        return above / total * math.sqrt(count / (count - 1))


class Compared(NamedTuple):
    """One number in two artifacts, by the sums that it is a ratio of."""

    name: str
    sums: tuple[Sums, Sums]
    how: str
    """What both share, such as ``item by item``."""


def _length(influences: np.ndarray) -> float:
    return float(np.sqrt(np.square(influences).sum())) if len(influences) else math.nan


def mean_of(values: Any, clusters: Any) -> Estimate:
    """Return the mean of ``values`` ``[n]`` and its standard error over ``clusters`` ``[n]``; NaN is left out."""
    return Sums.of(values, clusters).estimate


def mean_of_independent(values: Any) -> Estimate:
    """Return the mean of independent values ``[n]``, such as one a run, and its standard error; NaN is left out."""
    return mean_of(values, np.arange(len(values)))


def mean_of_estimates(estimates: Sequence[Estimate]) -> Estimate:
    """Return the plain mean of independent estimates, as of iterations with other prompts, from their own errors.

    Estimates without a mean are left out; one without an error leaves the mean without an error.
    """
    known = [one for one in estimates if math.isfinite(one.mean)]
    if not known:
        return Estimate.missing()
    mean, error = math.fsum(one.mean for one in known) / len(known), math.hypot(*(one.error for one in known))
    counts = sum(one.n for one in known), sum(one.clusters for one in known)
    return Estimate(mean, error / len(known), *counts)


def mean_of_sums(sides: Sequence[Sums]) -> Estimate:
    """Return the plain mean of ratios, as of iterations, and its standard error, with equal clusters taken together.

    It equals the error of :func:`mean_of_estimates` if no two have a cluster in common. Sides without values are left
    out; one of a single cluster leaves the mean without an error.
    """
    known = [one for one in sides if math.isfinite(one._ratio)]
    if not known:
        return Estimate.missing()
    mean = math.fsum(one._ratio for one in known) / len(known)
    names, of = np.unique(np.concatenate([one.names for one in known]), return_inverse=True)
    moved = np.bincount(of, np.concatenate([one._influences for one in known]), len(names)) / len(known)
    return Estimate(mean, _length(moved), sum(one.n for one in known), len(names))
