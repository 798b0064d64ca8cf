"""Excerpts of the answers and losses of a policy of a VLM, for reports. Imports no torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from stages.artifacts.artifact import Artifact
from stages.formats.tables import read_table
from stages.reporting.excerpt import HELD_OUT_LOSS, Change, Excerpt, Loss, Question, Score
from stages.vlm.settings import VlmEvaluate

CORRECT = "correct answers: "
"""Beginning of the names of the shares of correct answers."""


def summary_of(table: Any, *, generated: bool) -> dict[str, Any]:
    """Return the mean loss over labels, and of each dataset the share of correct answers with its standard error.

    Conversations whose last answer ``model_max_length`` cuts off are not asked; ``cut`` counts them.
    """
    labels = int(table["label_tokens"].sum())
    loss = float(table["loss_sum"].sum()) / labels
    found: dict[str, Any] = {"loss": loss if math.isfinite(loss) else None, "items": len(table), "label_tokens": labels}
    if not generated:
        return found
    asked = table[_asked(table)]
    if len(asked) < len(table):
        found["cut"] = len(table) - len(asked)
    for source, rows in asked.groupby("source"):
        share = float(rows["correct"].mean())
        found[f"correct_{source}"] = share
        found[f"correct_{source}_error"] = math.sqrt(share * (1 - share) / len(rows))
    return found


def excerpt_of(artifact: Artifact, first: Artifact | None = None) -> Excerpt:
    """Return the loss and the shares of correct answers; with the evaluation of version 0 also their changes."""
    table = _read(artifact)
    before = None if first is None else _read(first)
    names = sorted(set(table.loc[_asked(table), "source"])) if artifact.manifest.config["max_new_tokens"] else []
    return Excerpt(
        k=artifact.manifest.iteration or 0,
        samples=len(table),
        scores=tuple(_score(name, table) for name in names),
        loss=_loss(table),
        changes=() if before is None else tuple(_changes(table, before, names)),
    )


@dataclass(frozen=True)
class Answered:
    """An answer to a question that is shown."""

    question: Question
    source: str
    """Name of its dataset."""
    expected: str
    answer: str
    correct: bool
    first: str | None
    """The answer of version 0; None if this is it."""


def answers_of(artifact: Artifact, first: Artifact | None = None) -> list[Answered]:
    """Return the answers that are shown; none where no answers were generated."""
    if VlmEvaluate.SHOWN not in artifact.manifest.files:
        return []
    table = _read(artifact)
    before = None if first is None else _read(first)["answer"]
    questions = [Question.model_validate(one) for one in artifact.json(VlmEvaluate.SHOWN)]
    return [_answered(one, table.loc[one.number], before) for one in questions]


def _answered(question: Question, row: Any, before: Any | None) -> Answered:
    first = None if before is None else str(before[question.number])
    return Answered(question, row["source"], row["expected"], row["answer"], bool(row["correct"]), first)


def _asked(table: Any) -> Any:
    """Return of each row whether an answer was generated. Version 1 of the stage asked everything."""
    return table["asked"].astype(bool) if "asked" in table else pd.Series(data=True, index=table.index)


def _read(artifact: Artifact) -> Any:
    return read_table(artifact, VlmEvaluate.ANSWERS).set_index("number")


def _score(source: str, table: Any) -> Score:
    asked = _asked(table) & (table["source"] == source)
    name, correct = f"{CORRECT}{source}", table.loc[asked, "correct"].astype("float64")
    return Score.of(name, name, correct, pd.Series(correct.index, correct.index))


def _loss(table: Any) -> Loss:
    """Return the mean over all labels, and its standard error over conversations."""
    sums, labels = (table[name].to_numpy("float64") for name in ("loss_sum", "label_tokens"))
    mean, count = float(sums.sum() / labels.sum()), len(table)
    if not math.isfinite(mean):
        return Loss(mean=None, error=None, n=count)
    # A ratio of two sums: its error is that of what each conversation lacks to the mean.
    gaps = sums - mean * labels
    error = math.sqrt(count * float(gaps.var(ddof=1))) / labels.sum() if count > 1 else None
    return Loss(mean=mean, error=error, n=count)


def _changes(table: Any, before: Any, names: list[str]) -> Iterator[Change]:
    for source in names:
        asked = _asked(table) & (table["source"] == source)
        rises = (table["correct"].astype("float64") - before["correct"].astype("float64"))[asked]
        yield _change(f"{CORRECT}{source}", rises)
    losses = [one["loss_sum"] / one["label_tokens"] for one in (table, before)]
    yield _change(HELD_OUT_LOSS, (losses[0] - losses[1]).replace([np.inf, -np.inf], np.nan))


def _change(of: str, rises: Any) -> Change:
    known = rises.dropna()
    error = float(known.sem()) if len(known) > 1 else None
    return Change(
        of=of,
        mean=float(known.mean()) if len(known) else None,
        error=error,
        n=len(known),
        better=int((known > 0).sum()),
        worse=int((known < 0).sum()),
    )
