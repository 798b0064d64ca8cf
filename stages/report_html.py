"""The pieces of the report's page: plain HTML and SVG, every text escaped, every picture inside the file."""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from PIL import Image

from stages.manifest import Manifest

WIDTH, HEIGHT, MARGIN = 640, 220, 44
"""Of a curve, in SVG units."""
COLOURS = ("#2a6fdb", "#d9622b")
Point = tuple[float, float, float]
"""x, y, half height of the error bar."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #6b7280; --line: #d8dce2; --paper: #fff; --card: #f6f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #9aa3af; --line: #363b43; --paper: #16181c; --card: #1f2227; } }
body { font: 15px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 980px; margin: 0 auto; padding: 2.5rem 1.25rem 5rem; }
h1 { font-size: 1.4rem; font-weight: 600; margin: 0 0 1.5rem; } h2 { font-size: 1.05rem; margin: 2.5rem 0 .75rem; }
small, figcaption, .soft { color: var(--soft); } p { margin: .35rem 0; }
.headline { font-size: 2.2rem; font-weight: 600; letter-spacing: -.02em; } .headline small { font-size: 1rem; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(210px, 1fr)); gap: .75rem; }
.card { background: var(--card); border-radius: 8px; padding: .6rem; }
.pair { display: flex; gap: .5rem; } figure { margin: 0; flex: 1; min-width: 0; }
img { width: 100%; image-rendering: pixelated; border-radius: 4px; display: block; }
figcaption { font-size: .8rem; overflow-wrap: anywhere; } .up { color: #1a8f4a; } .down { color: #c8402f; }
details { border-top: 1px solid var(--line); padding: .5rem 0; } summary { cursor: pointer; }
table { border-collapse: collapse; font-size: .82rem; } td, th { padding: .2rem .8rem .2rem 0; text-align: left; }
code { font-size: .78rem; } svg { width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 11px; }
.scroll { overflow-x: auto; }
"""


@dataclass(frozen=True)
class Picture:
    """One sample: uint8 RGB pixels ``[frames, height, width, 3]``, its prompt, its score and a word about it."""

    pixels: np.ndarray
    prompt: str
    score: float | None
    note: str = ""


def page(title: str, parts: Sequence[str]) -> str:
    """The whole document."""
    body = "\n".join(part for part in parts if part)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    heading = f"<h1>{escape(title)}</h1>"
    return (
        f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head>'
        f"<body>{heading}\n{body}\n</body></html>\n"
    )


def curve(title: str, series: dict[str, list[Point]]) -> str:
    """Lines with error bars over one pair of axes."""
    points = [point for values in series.values() for point in values]
    low, high = min(y - e for _, y, e in points), max(y + e for _, y, e in points)
    first, last = min(x for x, _, _ in points), max(x for x, _, _ in points)
    room = 0.05 * (high - low) or 0.5

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / ((last - first) or 1)
        up = (y - low + room) / (high - low + 2 * room)
        return MARGIN + across * (WIDTH - 2 * MARGIN), HEIGHT - 24 - up * (HEIGHT - 40)

    drawn = [_series(values, place, COLOURS[i % len(COLOURS)]) for i, values in enumerate(series.values()) if values]
    names = [name for name, values in series.items() if values]
    legend = " ".join(
        f'<tspan style="fill:{COLOURS[list(series).index(name) % len(COLOURS)]}">● {escape(name)}</tspan>'
        for name in names
    )
    ticks = "".join(_tick(value, place(first, value)[1]) for value in np.linspace(low, high, 4).tolist())
    bounds = ((MARGIN, first), (WIDTH - MARGIN, last))
    ends = "".join(f'<text x="{x}" y="{HEIGHT - 4}">{value:g}</text>' for x, value in bounds)
    label = f'<text x="{MARGIN}" y="12">{legend}</text>'
    picture = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{ticks}{"".join(drawn)}{ends}{label}</svg>'
    return f"<h2>{escape(title)}</h2>{picture}"


def _series(values: list[Point], place: Callable[[float, float], tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(x, y) for x, y, _ in values))
    marks = []
    for x, y, error in values:
        (across, top), (_, bottom), (_, middle) = place(x, y + error), place(x, y - error), place(x, y)
        marks.append(
            f'<line x1="{across:.1f}" x2="{across:.1f}" y1="{top:.1f}" y2="{bottom:.1f}" '
            f'stroke="{colour}" opacity=".4"/>'
        )
        marks.append(f'<circle cx="{across:.1f}" cy="{middle:.1f}" r="2.5" fill="{colour}"/>')
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>{"".join(marks)}'


def _tick(value: float, y: float) -> str:
    line = f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8884" stroke-width=".5"/>'
    return f'{line}<text x="0" y="{y + 4:.1f}">{value:.3g}</text>'


def comparison(pairs: Sequence[tuple[Picture, ...]]) -> str:
    """Base and final pictures of the same prompts and seeds."""
    cards = []
    for base, final in pairs:
        change = "" if base.score is None or final.score is None else _change(final.score - base.score)
        prompt = f"<figcaption>{escape(base.prompt)} {change}</figcaption>"
        cards.append(f'<div class="card"><div class="pair">{_figure(base)}{_figure(final)}</div>{prompt}</div>')
    return f'<h2>Base and final policy, same prompts and seeds</h2><div class="grid">{"".join(cards)}</div>'


def _change(difference: float) -> str:
    if difference == 0:
        return ""
    return f'<span class="{"up" if difference > 0 else "down"}">{difference:+.2f}</span>'


def group(prompt: str, pictures: Sequence[Picture]) -> str:
    """Best and worst sample of one prompt."""
    return f'<div class="card"><p>{escape(prompt)}</p><div class="pair">{"".join(map(_figure, pictures))}</div></div>'


def table(title: str, groups: Sequence[str], words: Sequence[str]) -> str:
    """A section that opens on a click."""
    said = "".join(f'<p class="soft">{escape(word)}</p>' for word in words)
    return f'<details><summary>{escape(title)}</summary><div class="grid">{"".join(groups)}</div>{said}</details>'


def _figure(picture: Picture) -> str:
    score = "failed" if picture.score is None else f"{picture.score:.2f}"
    words = escape(f"{score} {picture.note}".strip())
    image = f'<img alt="{escape(picture.prompt)}" src="{_data_uri(picture.pixels)}">'
    return f"<figure>{image}<figcaption>{words}</figcaption></figure>"


def _data_uri(pixels: np.ndarray) -> str:
    """A PNG; of a video its first, middle and last frames side by side."""
    frames = [pixels[i] for i in sorted({0, len(pixels) // 2, len(pixels) - 1})]
    buffer = io.BytesIO()
    Image.fromarray(np.concatenate(frames, axis=1)).save(buffer, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def provenance(manifests: Sequence[Manifest]) -> str:
    """Which artifacts the page was made from."""
    cells = [
        (
            m.stage,
            "" if m.iteration is None else str(m.iteration),
            m.content[:16],
            m.fingerprint[:16],
        )
        for m in manifests
    ]
    rows = "".join("<tr>" + "".join(f"<td><code>{escape(c)}</code></td>" for c in row) + "</tr>" for row in cells)
    head = "".join(f"<th>{name}</th>" for name in ("stage", "iteration", "content", "fingerprint"))
    shown = f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'
    return f"<h2>Made from</h2><details><summary>{len(cells)} artifacts</summary>{shown}</details>"
