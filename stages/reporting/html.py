"""Pieces of a page that stands alone: no script, no file and no address outside it. Knows nothing of runs."""

import base64
import html
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from cosmos_rl_core.storage import media
from stages.formats.samples import StoredSample

MAX_SIDE = 256
"""Larger pictures are shrunk to this many pixels a side, as JPEG: a page is for looking, the shards are exact."""
_PIXELATED_SIDE = 128
_WIDTH, _HEIGHT = 760, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 14, 44

# No source but what is in the file: a browser refuses the rest.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def text(value: object) -> str:
    """Any value as HTML text, also safe inside a quoted attribute."""
    return html.escape(str(value))


def number(value: float | None) -> str:
    """Four significant digits; a dash for what does not exist."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.4g}".replace("-", "−")


def signed(value: float) -> str:
    """As :func:`number`, with its sign."""
    return number(value) if value < 0 or not math.isfinite(value) else f"+{number(value)}"


@dataclass(frozen=True)
class Estimate:
    """A mean over ``n`` samples and its standard error, both NaN where there are too few."""

    mean: float
    error: float
    n: int

    @property
    def parts(self) -> tuple[str, str]:
        """The mean, and `` ± error`` or nothing, to two significant digits of the error."""
        if not math.isfinite(self.error) or self.error <= 0:
            return number(self.mean), " ± 0" if self.error == 0 else ""
        decimals = min(6, max(0, 1 - math.floor(math.log10(self.error))))
        return f"{self.mean:.{decimals}f}".replace("-", "−"), f" ± {self.error:.{decimals}f}"

    def __str__(self) -> str:
        return "".join(self.parts)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table that scrolls inside its own box; cells are text."""
    head = "".join(f"<th>{text(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>'
    )


def section(title: str, *blocks: str) -> str:
    """A headed part of the page."""
    return f"<section><h2>{text(title)}</h2>\n" + "\n".join(blocks) + "\n</section>"


def picture(sample: StoredSample) -> str:
    """The sample's image; of a video its first, middle and last frame side by side; words where there is none."""
    if not sample.finite:
        return '<div class="frames"><p class="failed">no picture: the sample is not finite</p></div>'
    if not sample.media:
        return '<div class="frames"><p class="failed">the picture was deleted (rollout.keep.media)</p></div>'
    frames = sample.pixels
    shown = sorted({0, len(frames) // 2, len(frames) - 1})
    sources = [_source(frames[i]) for i in shown]
    alt = text(sample.row["prompt"])
    sharp = ' class="px"' if max(frames.shape[1:3]) <= _PIXELATED_SIDE else ""
    height, width = frames.shape[1:3]
    images = [f'<img{sharp} src="{source}" width="{width}" height="{height}" alt="{alt}">' for source in sources]
    return f'<div class="frames">{"".join(images)}</div>'


def is_film(sample: StoredSample) -> bool:
    """Whether :func:`picture` shows several frames."""
    return bool(sample.media) and sample.extension == media.VIDEO


def _source(pixels: np.ndarray) -> str:
    """A data URI of uint8 ``[height, width, 3]``: exact if small."""
    image, buffer, kind = Image.fromarray(pixels), io.BytesIO(), "png"
    if max(image.size) > MAX_SIDE:
        kind = "jpeg"
        image.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.LANCZOS)
        image.save(buffer, format="JPEG", quality=85)
    else:
        image.save(buffer, format="PNG", optimize=True)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


@dataclass(frozen=True)
class Series:
    """One curve: a line with a band, or points with bars."""

    label: str
    points: list[tuple[float, Estimate]]
    line: bool


def curve(series: Sequence[Series], x_label: str, y_label: str) -> str:
    """A figure of all series on the same axes, with a legend; nothing if there is no finite point."""
    drawn = [Series(s.label, [p for p in s.points if math.isfinite(p[1].mean)], s.line) for s in series]
    drawn = [s for s in drawn if s.points]
    if not drawn:
        return ""
    axes = _Axes.around([point for s in drawn for point in s.points])
    marks = "".join(_line(s, axes) if s.line else _dots(s, axes) for s in drawn)
    legend = "".join(f'<span class="key {"line" if s.line else "dot"}">{text(s.label)}</span>' for s in drawn)
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{text(y_label)} by {text(x_label)}">'
        f"{axes.draw(x_label)}{marks}</svg>\n<figcaption>{legend}</figcaption></figure>"
    )


@dataclass(frozen=True)
class _Axes:
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    @classmethod
    def around(cls, points: list[tuple[float, Estimate]]) -> "_Axes":
        spread = [(p.mean, p.error if math.isfinite(p.error) else 0.0) for _, p in points]
        low, high = min(m - e for m, e in spread), max(m + e for m, e in spread)
        pad = (high - low) * 0.06 or max(abs(high) * 0.1, 1e-9)
        xs = [x for x, _ in points]
        half = 0.5 if min(xs) == max(xs) else 0.0
        return cls((min(xs) - half, max(xs) + half), (low - pad, high + pad))

    def x(self, value: float) -> float:
        low, high = self.x_range
        return _LEFT + 8 + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT - 16)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def draw(self, x_label: str) -> str:
        """Grid lines and tick labels."""
        parts: list[str] = []
        for value in _ticks(*self.y_range, 5):
            y = f"{self.y(value):.1f}"
            parts.append(f'<path class="grid" d="M{_LEFT} {y}H{_WIDTH - _RIGHT}"/>')
            parts.append(f'<text x="{_LEFT - 8}" y="{y}" dy=".35em" text-anchor="end">{number(value)}</text>')
        for value in _ticks(*self.x_range, 10, whole=True):
            place = f'x="{self.x(value):.1f}" y="{_HEIGHT - _BOTTOM + 18}"'
            parts.append(f'<text {place} text-anchor="middle">{number(value)}</text>')
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        parts.append(f'<text x="{middle:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">{text(x_label)}</text>')
        return "".join(parts)


def _ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """Round values inside the range, at steps of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(power * f for f in (1, 2, 5, 10) if (high - low) / (power * f) <= most)
    step = max(step, 1.0) if whole else step
    return [k * step for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _line(series: Series, axes: _Axes) -> str:
    ends = [(x, p.mean, p.error if math.isfinite(p.error) else 0.0) for x, p in series.points]
    upper = [_at(axes, x, mean + error) for x, mean, error in ends]
    lower = [_at(axes, x, mean - error) for x, mean, error in reversed(ends)]
    path = f'<polygon class="band" points="{" ".join(upper + lower)}"/>'
    path += f'<polyline class="curve" points="{" ".join(_at(axes, x, mean) for x, mean, _ in ends)}"/>'
    # Beads on a long line hide it.
    return path + (_marks(series, axes, "bead", 3) if len(ends) <= 40 else "")


def _dots(series: Series, axes: _Axes) -> str:
    bars = [
        f'<path class="bar" d="M{axes.x(x):.1f} {axes.y(p.mean - p.error):.1f}V{axes.y(p.mean + p.error):.1f}"/>'
        for x, p in series.points
        if math.isfinite(p.error)
    ]
    return "".join(bars) + _marks(series, axes, "dot", 5)


def _marks(series: Series, axes: _Axes, kind: str, radius: int) -> str:
    return "".join(
        f'<circle class="{kind}" cx="{axes.x(x):.1f}" cy="{axes.y(p.mean):.1f}" r="{radius}">'
        f"<title>{text(series.label)}, {number(x)}: {p}, n = {p.n}</title></circle>"
        for x, p in series.points
    )


def _at(axes: _Axes, x: float, y: float) -> str:
    return f"{axes.x(x):.1f},{axes.y(y):.1f}"


def page(title: str, subtitle: str, sections: Sequence[str]) -> bytes:
    """The whole file."""
    body = "\n".join(part for part in sections if part)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{text(_POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<main>\n"
        f"<header><h1>{text(title)}</h1><p>{text(subtitle)}</p></header>\n{body}\n</main>\n</body>\n</html>\n"
    ).encode()


_CSS = """
:root { --ground: #fbfbfa; --card: #fff; --ink: #1d2126; --soft: #626a73; --rule: #e4e6e8; --train: #3b6fb5;
  --held: #c9622b; --good: #1f7f4c; --bad: #b3372f; --good-wash: #e6f3ec; --bad-wash: #faebe9; --wash: #f0f1f2; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171a; --card: #1c2024; --ink: #e6e8ea; --soft: #9aa3ac;
  --rule: #2d3339; --train: #7aa9e6; --held: #e8935f; --good: #62c08e; --bad: #ec8a80; --good-wash: #17301f;
  --bad-wash: #3a1f1d; --wash: #262b30; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); -webkit-text-size-adjust: 100%;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 3rem clamp(1rem, 4vw, 2.5rem) 5rem; }
header p, .note { color: var(--soft); margin: .25rem 0 0; }
.note { max-width: 44rem; margin: 0 0 1.25rem; font-size: .9rem; }
h1 { font-size: 1.9rem; line-height: 1.2; letter-spacing: -.015em; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; letter-spacing: -.005em; margin: 0 0 .4rem; }
section { margin-top: 3.25rem; }
.numbers { display: flex; flex-wrap: wrap; gap: 1rem; margin-top: 1rem; }
.numbers div { flex: 1 1 13rem; background: var(--card); border: 1px solid var(--rule); border-radius: 12px;
  padding: 1.1rem 1.3rem; }
.numbers b { display: block; font-size: clamp(2.1rem, 6vw, 2.9rem); line-height: 1.2; font-weight: 600;
  letter-spacing: -.025em; font-variant-numeric: tabular-nums; white-space: nowrap; }
.numbers i { font-style: normal; font-size: 1.05rem; font-weight: 400; color: var(--soft); letter-spacing: 0; }
.numbers span { color: var(--soft); font-size: .88rem; }
.numbers .better b { color: var(--good); } .numbers .worse b { color: var(--bad); }
figure { margin: 0; padding: 1rem 1rem .8rem; background: var(--card);
  border: 1px solid var(--rule); border-radius: 12px; }
svg { display: block; width: 100%; height: auto; font-size: 12px; }
@media (max-width: 600px) { svg { font-size: 20px; } figure { padding: .6rem; } }
svg text { fill: var(--soft); font-variant-numeric: tabular-nums; }
.grid { stroke: var(--rule); } .band { fill: var(--train); opacity: .16; }
.curve { fill: none; stroke: var(--train); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.bead { fill: var(--train); } .bar { stroke: var(--held); stroke-width: 2; }
circle.dot { fill: var(--held); stroke: var(--card); stroke-width: 1.5; }
figcaption { display: flex; flex-wrap: wrap; gap: .3rem 1.5rem; padding: .5rem .5rem 0;
  font-size: .88rem; color: var(--soft); }
.key { display: flex; align-items: center; gap: .5rem; } .key::before { content: ""; flex: none; }
.key.line::before { width: 1.2rem; height: 3px; border-radius: 2px; background: var(--train); }
.key.dot::before { width: .65rem; height: .65rem; border-radius: 50%; background: var(--held); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 19rem), 1fr)); gap: 1rem; }
.card { min-width: 0; background: var(--card); border: 1px solid var(--rule); border-top: 3px solid var(--rule);
  border-radius: 10px; padding: .8rem; }
.card.better { border-top-color: var(--good); } .card.worse { border-top-color: var(--bad); }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: .7rem; } .pair.film { grid-template-columns: 1fr; }
.frames { display: flex; gap: 3px; } .frames img { flex: 1 1 0; min-width: 0; }
img { display: block; width: 100%; height: auto; border-radius: 4px; background: var(--wash); }
.px { image-rendering: pixelated; }
.line { display: flex; justify-content: space-between; gap: .7rem; font-size: .88rem; margin-top: .35rem;
  font-variant-numeric: tabular-nums; }
.line span { color: var(--soft); }
.prompt { margin: .6rem 0 0; font-size: .88rem; line-height: 1.4; color: var(--soft); overflow-wrap: anywhere; }
.chip { display: inline-block; padding: 0 .5em; border-radius: 99px; background: var(--wash); color: var(--soft);
  font-size: .85rem; font-variant-numeric: tabular-nums; }
.better > .chip { background: var(--good-wash); color: var(--good); }
.worse > .chip { background: var(--bad-wash); color: var(--bad); }
.failed { color: var(--bad); font-size: .88rem; margin: .35rem 0 0; overflow-wrap: anywhere; }
details { border-top: 1px solid var(--rule); } details:last-of-type { border-bottom: 1px solid var(--rule); }
summary { padding: .75rem .25rem; cursor: pointer; font-variant-numeric: tabular-nums; }
summary b { font-weight: 600; display: inline-block; min-width: 7.5rem; } summary span { color: var(--soft); }
h3 { font-size: .95rem; font-weight: 600; margin: .75rem 0 .6rem; overflow-wrap: anywhere; }
h3 span { font-weight: 400; color: var(--soft); }
details .cards { grid-template-columns: repeat(auto-fill, minmax(min(100%, 14rem), 1fr)); margin-bottom: 1.5rem; }
.scroll { overflow: auto; max-height: 30rem; background: var(--card);
  border: 1px solid var(--rule); border-radius: 12px; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .45rem .9rem; white-space: nowrap; } th { color: var(--soft); font-weight: 500; }
th:first-child, td:first-child { text-align: left; }
thead th { position: sticky; top: 0; background: var(--card); box-shadow: inset 0 -1px var(--rule); }
tbody tr + tr td { border-top: 1px solid var(--rule); }
.names td, .names th { text-align: left; } .names td {
  font-family: ui-monospace, Menlo, Consolas, monospace; font-size: .8rem; }
"""
