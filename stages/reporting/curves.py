"""Curves, sparklines and histograms as SVG, in the colours and font of the page. Equal points give equal bytes.

This module draws them without a plotting library, in milliseconds, because a run draws its page after each iteration.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from markupsafe import Markup, escape

from cosmos_rl_core.estimates.digits import number
from cosmos_rl_core.estimates.estimate import Estimate

WIDE, SMALL = (760, 300), (372, 190)
"""Width and height in pixels of a single drawing, and of a drawing among several."""
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 40
"""Pixels around the axes."""
MAX_BEADS = 40
"""Most points of a line with marks at its points. On a longer line the marks would hide it."""
BINS = 24


@dataclass(frozen=True)
class Series:
    """Estimates along an axis: a line with a band, or points with bars, of one standard error if it is known."""

    label: str
    points: Sequence[tuple[int, Estimate]]
    line: bool
    ink: str = "train"
    """Name of the page's colour."""

    @property
    def rows(self) -> list[tuple[int, Estimate, int]]:
        """Return one row per point with a finite mean: x value, estimate, number of values."""
        return [(x, point, point.n) for x, point in self.points if math.isfinite(point.mean)]


@dataclass(frozen=True)
class Axis:
    """A linear scale from values to pixels, with round ticks."""

    low: float
    high: float
    begin: float
    end: float

    @classmethod
    def over(cls, values: Iterable[float], begin: float, end: float, margin: float = 0.06) -> "Axis":
        """Return an axis that covers all finite values, with a margin on both sides."""
        known = [value for value in values if math.isfinite(value)]
        low, high = min(known), max(known)
        spare = (high - low) * margin or max(abs(high), 1e-9) * 0.1
        return cls(low - spare, high + spare, begin, end)

    def at(self, value: float) -> str:
        """Return the pixel coordinate of a value, as text for SVG."""
        place = self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)
        return f"{place:.1f}".rstrip("0").rstrip(".")

    def ticks(self, most: int, *, whole: bool = False) -> list[float]:
        """Return at most about ``most`` multiples of 1, 2 or 5 times a power of ten."""
        rough = (self.high - self.low) / most
        power = 10 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
        step = max(1, round(step)) if whole else step
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [place * step for place in range(first, last + 1)]


def curve(series: Sequence[Series], x_label: str, size: tuple[int, int] = WIDE, marks: Sequence[float] = ()) -> Markup:
    """Draw series on the same axes as an ``<svg>`` element. ``marks`` are x values to mark on the axis."""
    width, height = size
    rows = [row for one in series for row in one.rows]
    x = Axis.over([row[0] for row in rows], LEFT, width - RIGHT, 0.02)
    ends = ([p.mean - _error(p), p.mean + _error(p)] for _, p, _ in rows)
    y = Axis.over([value for pair in ends for value in pair], height - BOTTOM, TOP)
    parts = [*_axes(x, y, x_label, size)]
    parts += [f'<path class="mark" d="M{x.at(k)} {y.at(y.low)}v-9"/>' for k in marks if x.low <= k <= x.high]
    for one in series:
        parts += _line(one, x, y) if one.line else _points(one, x, y)
    return _svg(parts, size, f"{', '.join(one.label for one in series)} by {x_label}")


def _axes(x: Axis, y: Axis, x_label: str, size: tuple[int, int], *, whole: bool = True) -> Iterable[str]:
    width, height = size
    for tick in y.ticks(5):
        yield f'<path class="grid" d="M{LEFT} {y.at(tick)}H{width - RIGHT}"/>'
        place = f'x="{LEFT - 6}" y="{y.at(tick)}" dy=".35em" text-anchor="end"'
        yield f'<text class="tick" {place}>{number(_round(tick))}</text>'
    for tick in x.ticks(max(3, width // 90), whole=whole):
        place = f'x="{x.at(tick)}" y="{height - BOTTOM + 16}" text-anchor="middle"'
        yield f'<text class="tick" {place}>{number(_round(tick))}</text>'
    middle = (LEFT + width - RIGHT) / 2
    yield f'<text class="tick" x="{middle:g}" y="{height - 5}" text-anchor="middle">{escape(x_label)}</text>'


def _round(value: float) -> float:
    return float(f"{value:.6g}")


def _line(series: Series, x: Axis, y: Axis) -> Iterable[str]:
    rows = series.rows
    # A band through a point without an error would show it as certain.
    for known, some in groupby(rows, key=lambda row: math.isfinite(row[1].error)):
        banded = [*some] if known else []
        if any(_error(p) for _, p, _ in banded):
            above = [f"{x.at(k)} {y.at(p.mean + _error(p))}" for k, p, _ in banded]
            below = [f"{x.at(k)} {y.at(p.mean - _error(p))}" for k, p, _ in reversed(banded)]
            yield f'<path class="band {series.ink}" d="M{"L".join(above + below)}Z"/>'
    yield f'<path class="line {series.ink}" d="M{"L".join(f"{x.at(k)} {y.at(p.mean)}" for k, p, _ in rows)}"/>'
    for k, p, _ in rows:
        radius = 3 if len(rows) <= MAX_BEADS else 0
        yield f'<circle class="{series.ink}" cx="{x.at(k)}" cy="{y.at(p.mean)}" r="{radius}">{_title(k, p)}</circle>'


def _points(series: Series, x: Axis, y: Axis) -> Iterable[str]:
    for k, p, _ in series.rows:
        if _error(p):
            bar = f"M{x.at(k)} {y.at(p.mean - _error(p))}V{y.at(p.mean + _error(p))}"
            yield f'<path class="line {series.ink}" d="{bar}"/>'
        yield f'<circle class="{series.ink}" cx="{x.at(k)}" cy="{y.at(p.mean)}" r="4.5">{_title(k, p)}</circle>'


def _title(k: float, estimate: Estimate) -> str:
    return f"<title>{k:g}: {escape(str(estimate))}</title>"


def _error(estimate: Estimate) -> float:
    """Return half the length of a point's error bar; 0 if the point has no error."""
    return estimate.error if math.isfinite(estimate.error) else 0.0


def spark(values: Sequence[tuple[int, float]], marks: Iterable[int] = ()) -> Markup:
    """Draw a small curve with a line at 0 and dots at the x values ``marks``; nothing without two finite values."""
    known = [(k, value) for k, value in values if math.isfinite(value)]
    if len(known) < 2:
        return Markup("")
    size = (120, 28)
    x = Axis.over([k for k, _ in known], 3, 117, 0)
    y = Axis.over([0.0, *(value for _, value in known)], 25, 3)
    path = "L".join(f"{x.at(k)} {y.at(value)}" for k, value in known)
    parts = [f'<path class="grid" d="M0 {y.at(0)}H120"/>', f'<path class="line train" d="M{path}"/>']
    there, tripped = dict(known), set(marks)
    parts += [f'<circle class="bad" cx="{x.at(k)}" cy="{y.at(there[k])}" r="2.5"/>' for k in tripped & there.keys()]
    return _svg(sorted(parts, key=lambda part: part.startswith("<circle")), size, "over iterations", "spark")


def histogram(named: Sequence[tuple[str, Sequence[float]]], x_label: str) -> Markup:
    """Draw distributions as steps on the same axes. Each is a colour and its quantiles: the ends of equal parts."""
    size = SMALL
    width, height = size
    x = Axis.over([value for _, quantiles in named for value in quantiles], LEFT, width - RIGHT, 0.02)
    step = (x.high - x.low) / BINS
    edges = [x.low + step * place for place in range(BINS + 1)]
    shares = [(ink, [_below(q, b) - _below(q, a) for a, b in pairwise(edges)]) for ink, q in named]
    y = Axis(0.0, max(max(one) for _, one in shares) * 1.06, height - BOTTOM, TOP)
    parts = [*_axes(x, y, x_label, size, whole=False)]
    for ink, share in shares:
        steps = "".join(f"V{y.at(s)}H{x.at(b)}" for s, b in zip(share, edges[1:], strict=True))
        path = f"M{x.at(edges[0])} {y.at(0)}{steps}V{y.at(0)}"
        parts += [f'<path class="band {ink}" d="{path}Z"/>', f'<path class="line {ink}" d="{path}"/>']
    return _svg(parts, size, f"distribution of {x_label}")


def _below(quantiles: Sequence[float], value: float) -> float:
    """Return the share of samples below a value, as if samples were evenly spread between two quantiles."""
    parts, found = len(quantiles) - 1, 0.0
    for low, high in pairwise(quantiles):
        if high < value or high == low < value:
            found += 1
        elif low < value <= high and high > low:
            found += (value - low) / (high - low)
    return found / parts


def _svg(parts: Iterable[str], size: tuple[int, int], label: str, kind: str = "") -> Markup:
    width, height = size
    opening = f'<svg class="{kind}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
    return Markup(opening + "".join(parts) + "</svg>")
