"""Early warnings for people: what tripped in words, z-scores, and the samples that are most extreme."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Input
from stages.contracts import Warn
from stages.reporting.inputs import Samples
from stages.reporting.numbers import number
from stages.reporting.page import render
from stages.reporting.pictures import Picture, picture
from stages.reporting.words import words, z_score

Row = Mapping[str, Any]
"""A row of the evidence."""


@dataclass(frozen=True)
class Extreme:
    """One sample with the score that is judged."""

    picture: Picture
    prompt: str
    score: float


@dataclass(frozen=True)
class Warned:
    """A bound that was exceeded, and the samples that exceed it most."""

    iteration: int
    words: str
    samples: list[Extreme]


def warned(evidence: Row, samples: Samples | None) -> list[Warned]:
    """Return what tripped in an iteration, with the pictures of ``samples``, its rollout, if there is one."""
    return [
        Warned(evidence["iteration"], words(row), [] if samples is None else _extremes(row["samples"], samples))
        for row in evidence["tripped"]
    ]


def _extremes(scores: Sequence[tuple[str, float]], samples: Samples) -> list[Extreme]:
    stored = samples.load([sample_id for sample_id, _ in scores])
    return [Extreme(picture(stored[i]), stored[i].row["prompt"], score) for i, score in scores]


def z_scores(warnings: Sequence[Artifact]) -> tuple[list[str], list[list[str]]]:
    """Return the table of z-scores of policy 0: names of scores, and a row an iteration."""
    rows = [artifact.json(Warn.EVIDENCE) for artifact in warnings]
    names = dict.fromkeys(_name(level) for row in rows for level in row["levels"])
    found: list[list[str]] = []
    for row in rows:
        z = {_name(level): level["z"] for level in row["levels"]}
        found.append([str(row["iteration"]), *(z_score(z.get(name)) for name in names)])
    return ["iteration", *names] if rows else [], found


def _name(level: Row) -> str:
    return level["reward"] if level["score"] == level["reward"] else f"{level['reward']}: {level['score']}"


def warning_page(evidence: Row, samples: Input) -> bytes:
    """Return the HTML page of what tripped in an iteration."""
    found = warned(evidence, Samples.read(samples, None))
    levels = [
        [_name(row), number(row["first"]["mean"]), number(row["now"]["mean"]), z_score(row["z"]), z_score(row["drift"])]
        for row in evidence["levels"]
    ]
    return render("tripped.html", title=f"Warning in iteration {evidence['iteration']}", warned=found, levels=levels)
