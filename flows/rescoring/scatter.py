"""A scatter of two rewards as SVG, in the colours of the page. Equal tables give equal bytes."""

from collections.abc import Iterator
from typing import Any

from markupsafe import Markup

SIDE, MARGIN = 420, 34
REACH = 3.0
"""Standard deviations from the middle to the edge; samples beyond lie on the edge."""
MOST = 2000
"""Most points. If there are more samples, evenly spaced ones are drawn."""


def scatter(table: Any) -> Markup:
    """Draw ``new_z`` over ``old_z``, one point for each sample; nothing without samples."""
    if not len(table):
        return Markup("")
    chosen = table.iloc[:: -(-len(table) // MOST)]
    points = (
        f'<circle cx="{_at(old)}" cy="{_at(-new)}" r="3"/>'
        for old, new in zip(chosen["old_z"], chosen["new_z"], strict=True)
    )
    body = "".join([*_axes(), '<g fill="currentColor" fill-opacity=".35">', *points, "</g>"])
    label = f"new over old reward of {len(chosen)} samples, standardised within their groups"
    return Markup(
        f'<svg viewBox="0 0 {SIDE} {SIDE}" width="{SIDE}" height="{SIDE}" role="img" aria-label="{label}">{body}</svg>'
    )


def _axes() -> Iterator[str]:
    low, high = MARGIN, SIDE - MARGIN
    for value in range(-int(REACH), int(REACH) + 1):
        at, ink = _at(value), f'stroke="currentColor" stroke-opacity="{0.4 if value == 0 else 0.1}"'
        yield f'<path d="M{at} {low}V{high}M{low} {at}H{high}" {ink}/>'
        yield _text(at, high + 16, str(value))
        yield _text(low - 12, _at(-value) + 4, str(value))
    middle = SIDE // 2
    yield _text(middle, SIDE - 3, "old reward")
    yield _text(11, middle, "new reward", f' transform="rotate(-90 11 {middle})"')


def _text(x: float, y: float, words: str, turned: str = "") -> str:
    place = f'x="{x}" y="{y}" font-size="12" text-anchor="middle"'
    return f'<text {place} fill="currentColor"{turned}>{words}</text>'


def _at(value: float) -> float:
    """Return the pixel of a standardised score; the same for both axes, from the top or the left."""
    scale = (SIDE / 2 - MARGIN) / REACH
    return round(SIDE / 2 + scale * max(-REACH, min(REACH, float(value))), 1)
