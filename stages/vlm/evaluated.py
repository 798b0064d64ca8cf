"""Answers and losses of a VLM policy, read for reports, metrics and comparisons. Imports no torch."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from cosmos_rl_core.estimates.estimate import Compared, Sums
from cosmos_rl_core.rewards._base.answers import finite
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.formats.losses import APART
from stages.formats.tables import read_table
from stages.reporting.excerpt import HELD_OUT_LOSS, Answered, Change, Excerpt, Failure, Loss, Question, Score
from stages.vlm.contracts import VlmEvaluate

CORRECT = "correct answers: "
"""Beginning of the names of the shares of correct answers."""
_ERRORS_AS_NOW = 3
"""First version of the stage that computes standard errors as this code does."""
_UNFINISHED_COUNTED = 4
"""First version of the stage whose lines have the loss's error, and that counts unfinished answers."""


def summary_of(table: Any, *, generated: bool) -> dict[str, Any]:
    """Return the mean loss over labels, and each dataset's share of correct answers, with errors over conversations.

    If ``model_max_length`` cuts off the last answer of a conversation, no answer is generated; ``cut`` counts these.
    ``unfinished`` counts answers of the policy that ``max_new_tokens`` cuts off, which are not correct.
    """
    loss = loss_sums(table).estimate
    found: dict[str, Any] = {"loss": finite(loss.mean), "standard_error": finite(loss.error), "items": len(table)}
    found["label_tokens"] = int(table["label_tokens"].sum())
    if not generated:
        return found
    asked = asked_of(table)
    if len(asked) < len(table):
        found["cut"] = len(table) - len(asked)
    if unfinished := int((~asked["whole"].astype(bool)).sum()):
        found["unfinished"] = unfinished
    for source, rows in asked.groupby("source"):
        share = correct_sums(rows).estimate
        found[f"correct_{source}"] = share.mean
        found[f"correct_{source}_error"] = finite(share.error)
    return found


def summary_from(artifact: Artifact) -> dict[str, Any]:
    """Return the numbers of the summary that follow from the table, as the artifact's stage version made them."""
    made = artifact.manifest
    found = summary_of(read_table(artifact, VlmEvaluate.ANSWERS), generated=made.config["max_new_tokens"] > 0)
    if made.version < _ERRORS_AS_NOW:
        found = {name: value for name, value in found.items() if not name.endswith("_error")}
    if made.version < _UNFINISHED_COUNTED:
        found.pop("unfinished", None)
    return found


def numbers_of(manifest: Manifest) -> dict[str, Any]:
    """Return the numbers of an evaluation's line in ``metrics.jsonl``, by their names after ``val/``.

    A line of an earlier version of the stage keeps its order, so that an audit finds it unchanged.
    """
    said, names = manifest.summary, {"avg_loss": "loss"}
    names |= {name: name for name in said if name.startswith("correct_")} | {"seconds": "seconds"}
    found = {name: said.get(key) for name, key in names.items()}
    if manifest.version < _UNFINISHED_COUNTED:
        return found
    found["avg_loss_standard_error"] = said.get("standard_error")
    return found | ({"unfinished": said.get("unfinished", 0)} if manifest.config["max_new_tokens"] else {})


def compared(a: Artifact, b: Artifact) -> Iterator[Compared]:
    """Yield losses and shares of correct answers of two evaluations, over the conversations that both have.

    If they share none, the numbers are over all conversations of each.
    """
    tables = [_named(one) for one in (a, b)]
    same = tables[0].index.intersection(tables[1].index)
    if not same.empty:
        tables = [table.loc[same] for table in tables]
    asked = [asked_of(table) for table in tables]
    found = [("avg_loss", [loss_sums(table) for table in tables])]
    for source in sorted({*asked[0]["source"]} & {*asked[1]["source"]}):
        sums = [correct_sums(table[table["source"] == source]) for table in asked]
        found.append((f"correct_{source}", sums))
    for name, (one, other) in found:
        if all(math.isfinite(sums.estimate.mean) for sums in (one, other)):
            yield Compared(name, (one, other), APART if same.empty else "conversation by conversation")


def _named(answers: Artifact) -> Any:
    """Return answers by dataset and id of the conversation, because each dataset of tokens has its own numbers."""
    table = answer_table(answers)
    return table.assign(number=table["source"] + "/" + table["id"]).set_index("number", drop=False)


def excerpt_of(artifact: Artifact, first: Artifact | None = None) -> Excerpt:
    """Return an excerpt of the loss and the shares of correct answers, with their changes since ``first``, if given."""
    table = answer_table(artifact)
    before = None if first is None else answer_table(first)
    names = sorted(set(asked_of(table)["source"])) if artifact.manifest.config["max_new_tokens"] else []
    return Excerpt(
        k=artifact.manifest.iteration or 0,
        samples=len(table),
        scores=tuple(_score(name, table) for name in names),
        failures=tuple(_unfinished(table, names, artifact.manifest.config["max_new_tokens"])),
        loss=Loss.of(loss_sums(table).estimate),
        changes=() if before is None else tuple(_changes(table, before, names)),
    )


def answers_of(artifact: Artifact, first: Artifact | None = None) -> list[Answered]:
    """Return the answers that a report shows; none if no answers were generated."""
    if VlmEvaluate.SHOWN not in artifact.manifest.files:
        return []
    table = answer_table(artifact)
    before = None if first is None else answer_table(first)["answer"]
    questions = [Question.model_validate(one) for one in artifact.json(VlmEvaluate.SHOWN)]
    return [_answered(one, table.loc[one.number], before) for one in questions]


def _answered(question: Question, row: Any, before: Any | None) -> Answered:
    first = None if before is None else str(before[question.number])
    correct, whole = bool(row["correct"]), bool(row["whole"])
    return Answered(question, row["source"], row["expected"], row["answer"], correct, whole, first)


def asked_of(table: Any) -> Any:
    """Return the rows for which an answer was generated. Version 1 of the stage asked everything."""
    return table[table["asked"].astype(bool)] if "asked" in table else table


def answer_table(artifact: Artifact) -> Any:
    """Return one row per conversation by its number: losses and answers."""
    return read_table(artifact, VlmEvaluate.ANSWERS).set_index("number", drop=False)


def _score(source: str, table: Any) -> Score:
    asked = asked_of(table)
    name, correct = f"{CORRECT}{source}", asked.loc[asked["source"] == source, "correct"].astype("float64")
    return Score.of(name, name, correct, pd.Series(correct.index, correct.index))


def loss_sums(table: Any) -> Sums:
    """Return the sums of losses and the numbers of labels of conversations: their ratio is the loss per label."""
    return Sums.of(table["loss_sum"].fillna(np.inf), table["number"], table["label_tokens"])


def correct_sums(rows: Any) -> Sums:
    """Return the correct answers among rows of conversations that were asked."""
    return Sums.of(rows["correct"].astype("float64"), rows["number"])


def _unfinished(table: Any, names: list[str], most_tokens: int) -> Iterator[Failure]:
    """Yield for each dataset how many answers were cut off: before version 4 of the stage they could be correct."""
    asked = asked_of(table)
    for source in names:
        if count := int((~asked.loc[asked["source"] == source, "whole"].astype(bool)).sum()):
            reason = f"cut off at max_new_tokens = {most_tokens}"
            yield Failure(what="answer", reward=f"{CORRECT}{source}", reason=reason, count=count)


def _changes(table: Any, before: Any, names: list[str]) -> Iterator[Change]:
    """Yield the changes since version 0 of the shares of correct answers and of the loss."""
    for source in names:
        asked = [rows[rows["source"] == source] for rows in map(asked_of, (before, table))]
        first, now = map(correct_sums, asked)
        rises = asked[1]["correct"].astype("float64") - asked[0]["correct"].astype("float64")
        yield Change.of_both(f"{CORRECT}{source}", first.change_to(now), rises)
    rises = table["loss_sum"] / table["label_tokens"] - before["loss_sum"] / before["label_tokens"]
    yield Change.of_both(HELD_OUT_LOSS, loss_sums(before).change_to(loss_sums(table)), rises)
