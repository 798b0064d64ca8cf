"""Curves as SVG with the colours and font of the page. Equal points give equal bytes."""

import io
import math
import re
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from stages.reporting.numbers import Estimate

WIDTH, HEIGHT = 760, 300
INKS = {"#3b6fb5": "var(--train)", "#c9622b": "var(--held)", "#e4e6e8": "var(--rule)", "#626a73": "var(--soft)"}
"""Colours that are drawn with, and the page's names for them, which differ between light and dark."""
LINE, POINTS, GRID, TEXT = INKS
ROUND = (1, 2, 5, 10)
"""Ticks are multiples of these, times a power of ten."""
MAX_BEADS = 40
"""A longer line has no marks at its points: they would hide it."""
# With a salt, ids are digests of what they name instead of random ones.
STYLE = {"svg.hashsalt": "report", "svg.fonttype": "none", "font.size": 12, "lines.linewidth": 2}


@dataclass(frozen=True)
class Series:
    """Estimates along an axis: a line with a band, or points with bars, of one standard error."""

    label: str
    points: list[tuple[int, Estimate]]
    line: bool

    @property
    def rows(self) -> list[tuple[int, Estimate, int]]:
        """Return a row for each point with a finite mean: place, estimate, number of samples."""
        return [(x, point, point.n) for x, point in self.points if math.isfinite(point.mean)]


@dataclass(frozen=True)
class Curve:
    """Series on the same axes."""

    title: str
    x_label: str
    series: list[Series]

    def svg(self) -> Markup:
        """Draw an ``<svg>`` element for an HTML page. Its only values are numbers and the names of axes in the code."""
        file = io.StringIO()
        # Without the settings of a matplotlibrc.
        with style.context(["default", STYLE]):
            figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
            axes = figure.add_axes((0.08, 0.19, 0.9, 0.77))
            axes.set_frame_on(False)
            axes.set_axisbelow(True)
            axes.grid(axis="y", color=GRID)
            axes.tick_params(length=0, pad=7, labelcolor=TEXT)
            axes.set_xlabel(self.x_label, labelpad=5, color=TEXT)
            axes.xaxis.set_major_locator(MaxNLocator(10, steps=ROUND, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(6, steps=ROUND))
            for series in self.series:
                x, points, _ = zip(*series.rows, strict=True)
                means = np.array([point.mean for point in points])
                errors = np.nan_to_num([point.error for point in points], posinf=0.0)
                if series.line:
                    axes.fill_between(x, means - errors, means + errors, color=LINE, alpha=0.16, linewidth=0)
                    axes.plot(x, means, color=LINE, marker="o" if len(x) <= MAX_BEADS else "")
                else:
                    axes.errorbar(x, means, errors, color=POINTS, fmt="o", markersize=9)
            # Without the time and the version of matplotlib.
            nameless = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            figure.savefig(file, format="svg", transparent=True, metadata=nameless)
        return Markup(_for_page(file.getvalue()))


def _for_page(svg: str) -> str:
    """Return the ``<svg>`` element alone, with the page's names of colours."""
    svg = svg[svg.index("<svg") :]
    # Nothing refers to these ids, and another curve of the page would repeat them.
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)
    svg = re.sub(r"font-size: 12px; font-family: [^;\"]*;? ?", "", svg)
    for ink, name in INKS.items():
        svg = svg.replace(ink, name)
    return svg
