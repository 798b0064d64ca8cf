"""The page of two runs side by side."""

import os.path
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

import pandas as pd
from markupsafe import Markup

from cosmos_rl_core.errors import unwritten
from cosmos_rl_core.estimates.estimate import Estimate
from flows.comparing.comparison import SCORES, STAGES, TENSORS, Comparison
from flows.comparing.side import Side
from flows.library.collected import Collected
from flows.planning import facts
from stages.reporting.book import Piece
from stages.reporting.curves import SMALL, Series, curve
from stages.reporting.page import render
from stages.reporting.pictures import References
from stages.reporting.training import CURVES, over_steps


def write_page(comparison: Comparison, path: str) -> str:
    """Write the page to a file on this machine, and return its path. It opens from the disk.

    Raises :class:`ConfigError` if the file cannot be written, :class:`NoSpaceError` on a full disk.
    """
    file = Path(path).expanduser().absolute()
    data = page(comparison, str(file.parent))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    except OSError as error:
        raise unwritten(file, error) from error
    return str(file)


def page(comparison: Comparison, folder: str) -> bytes:
    """Return the page for a file of a local folder, from which it links to full pictures of local stores."""
    a, b, shown = comparison.a, comparison.b, comparison.pictures
    pieces = () if shown is None else shown.pieces
    refer = shown is not None and any(pair.a.references for pair in shown.pairs)
    return render(
        "diff.html",
        title=f"{a.name} and {b.name}",
        one=comparison,
        sides=[(letter, side, facts.about(side.plan)) for letter, side in (("A", a), ("B", b))],
        curves=list(_curves(a, b)),
        stage_names=STAGES,
        score_names=SCORES,
        tensor_names=TENSORS,
        references=References(a.run.url) if refer else None,
        folders=[_full(side, piece, folder) for side, piece in zip((a, b), pieces, strict=False)],
    )


def _full(side: Side, piece: Piece, folder: str) -> str:
    """Return the address of the full pictures of a fragment; "" if its store is not on this machine's disk."""
    if "://" in side.run.url or not piece.folder:
        return ""
    return quote(os.path.relpath(os.path.join(side.run.slots.report, piece.folder), folder)) + "/"


INKS = (("A", "train"), ("B", "held"))
"""Names of the runs, and their colours in the page."""
Curve = tuple[str, Markup]


def _curves(a: Side, b: Side) -> Iterator[Curve]:
    """Yield titles and drawings of numbers that both runs have."""
    yield from _of_rollouts(a.collected, b.collected)
    if a.collected.trained and b.collected.trained:
        yield from _of_steps(a.collected, b.collected)


def _of_rollouts(a: Collected, b: Collected) -> Iterator[Curve]:
    first = next(iter(a.iterations.values()), None)
    for score in () if first is None else first.excerpt.scores:
        points = [
            [(k, piece.estimate(score.reward, score.score)) for k, piece in sorted(one.iterations.items())]
            for one in (a, b)
        ]
        yield from _curve(f"{score.name} of rollouts", points, "iteration")


def _of_steps(a: Collected, b: Collected) -> Iterator[Curve]:
    tables = [pd.concat([trained.steps for _, trained in sorted(one.trained.items())]) for one in (a, b)]
    for column, title in CURVES.items():
        if all(column in table for table in tables):
            known = [table[table[column].notna()] for table in tables]
            points = [over_steps(table["step"], table[column], title).points for table in known]
            yield from _curve(title, points, "optimizer steps done")


def _curve(title: str, points: Sequence[Sequence[tuple[int, Estimate]]], x_label: str) -> Iterator[Curve]:
    """Yield the drawing of both runs, if both have points."""
    series = [Series(name, some, line=True, ink=ink) for (name, ink), some in zip(INKS, points, strict=True)]
    if all(one.rows for one in series):
        yield title, curve(series, x_label, SMALL)
