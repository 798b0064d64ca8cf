"""Early warnings for people: the limits that tripped, in words, z-scores, and the most extreme samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cosmos_rl_core.estimates.digits import number
from stages.artifacts.request import Input
from stages.reporting.numbers import words, z_score
from stages.reporting.page import render
from stages.reporting.pictures import References, Thumb
from stages.reporting.samples import Samples

Row = Mapping[str, Any]
"""A row of the evidence."""


@dataclass(frozen=True)
class Extreme:
    """One sample with the score that exceeds a limit."""

    picture: Thumb
    prompt: str
    score: float
    references: tuple[Thumb, ...]
    """Pictures that its prompt refers to."""


@dataclass(frozen=True)
class Warned:
    """A bound that was exceeded, and the samples that exceed it most."""

    iteration: int
    words: str
    samples: list[Extreme]


def warned(evidence: Row, samples: Samples) -> list[Warned]:
    """Return the bounds that tripped in an iteration, with pictures from ``samples``, its rollout."""
    return [
        Warned(evidence["iteration"], words(row), _extremes(row["samples"], samples)) for row in evidence["tripped"]
    ]


def _extremes(scores: Sequence[tuple[str, float]], samples: Samples) -> list[Extreme]:
    by_id = dict(scores)
    references = References(samples.artifact.url)
    shown = {
        one.sample_id: Extreme(
            Thumb.of(one), one.row["prompt"], by_id[one.sample_id], references.of(one.row.get("references", ()))
        )
        for one in samples.load(by_id)
    }
    return [shown[sample_id] for sample_id, _ in scores]


def _name(level: Row) -> str:
    return level["reward"] if level["score"] == level["reward"] else f"{level['reward']}: {level['score']}"


def warning_page(evidence: Row, samples: Input) -> bytes:
    """Return the HTML page about the bounds that tripped in an iteration."""
    found = warned(evidence, Samples.read(samples, None))
    levels = [
        [_name(row), number(row["first"]["mean"]), number(row["now"]["mean"]), z_score(row["z"]), z_score(row["drift"])]
        for row in evidence["levels"]
    ]
    refer = any(sample.references for one in found for sample in one.samples)
    title = f"Warning in iteration {evidence['iteration']}"
    return render("tripped.html", title=title, warned=found, levels=levels, references=refer)
