"""Early warning: how far the scores of a rollout have moved from iteration 0's, and which limits tripped.

It only judges. What follows from a limit that tripped is decided in ``flows/warning``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from cosmos_rl_core.canonical import canonical_json, digest
from cosmos_rl_core.config.early_warning import Limit
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.estimates.estimate import FEWEST, scaled
from cosmos_rl_core.rewards._base.answers import finite
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.execution.context import Context, Ranks
from stages.reporting.warnings import warning_page
from stages.scoring.score_tables import scored_numbers
from stages.scoring.summaries import Spread

EXTREMES = 6
"""Most samples that the evidence names for each bound that is exceeded."""


@dataclass(frozen=True)
class Level:
    """One score of a reward in an iteration, and in iteration 0."""

    reward: str
    score: str
    now: Spread
    first: Spread

    @property
    def z(self) -> float:
        """Return the z-score: how far the mean has moved, in standard deviations of policy 0's samples."""
        return scaled(self.now.mean - self.first.mean, self.first.deviation)

    @property
    def drift(self) -> float:
        """Return how far the mean has moved, in standard errors of the difference; NaN with too few prompts.

        Iterations have different prompts: the error of one mean alone says little about the other. With fewer prompts
        than :data:`FEWEST`, errors say so little that honest runs would exceed any limit now and then.
        """
        return self.now.estimate.minus(self.first.estimate).in_errors

    def exceeded(self, limit: Limit) -> Iterator[tuple[str, float]]:
        """Yield the name and value of each bound that is exceeded. A number that cannot be computed exceeds none."""
        signed = {"below": -self.now.mean, "above": self.now.mean, "fall": -self.drift, "rise": self.drift}
        for name, value in signed.items():
            bound = getattr(limit, name)
            if bound is not None and value > (-bound if name == "below" else bound):
                yield name, bound

    def as_json(self) -> dict[str, Any]:
        """Return the level as JSON for the evidence, with None for numbers that are not finite."""
        spreads = {"now": self.now.as_json(), "first": self.first.as_json()}
        return {"reward": self.reward, "score": self.score, **spreads, "z": finite(self.z), "drift": finite(self.drift)}


def run(request: Request, context: Context[Ranks]) -> dict[str, Any]:
    """Write ``evidence.json`` and, if a limit tripped, a page with the samples that exceed it most.

    The evidence has ``scores`` and ``first``, the contents of the scores that were judged, by reward; ``numbers``, the
    digests of all numbers that a reward gave; ``levels``, one row per score of every reward; ``tripped``, one row per
    bound that is exceeded; and ``undecided``, the bounds on drift for which an iteration has too few prompts. Return
    its summary (:func:`summary_of`).
    """
    evidence = evidence_of(request)
    context.attempt.put(contracts.Warn.EVIDENCE, canonical_json(evidence))
    if evidence["tripped"]:
        context.attempt.put(contracts.Warn.PAGE, warning_page(evidence, request.one("samples")))
    return summary_of(evidence)


def summary_of(evidence: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many bounds of the evidence are exceeded and undecided, and the z-score of each reward that has one.

    They are ``tripped``, ``undecided`` unless none is, and ``<reward>_z``.
    """
    tripped, undecided = evidence["tripped"], evidence["undecided"]
    label_z = {row["reward"]: row["z"] for row in evidence["levels"] if row["reward"] == row["score"]}
    counts = {"tripped": len(tripped)} | ({"undecided": len(undecided)} if undecided else {})
    return counts | {f"{label}_z": z for label, z in label_z.items() if z is not None}


def evidence_of(request: Request) -> dict[str, Any]:
    """Return the evidence of a Request: the levels of all scores and the limits that they exceed."""
    config = request.settings(contracts.Warn)
    scores, first = (
        dict(zip(config.rewards, map(Artifact, request.inputs[role]), strict=True)) for role in ("scores", "first")
    )
    tables = {label: scored_numbers(label, scores[label]) for label in scores}
    before = {label: scored_numbers(label, first[label]) for label in first}
    levels = {
        (level.reward, level.score): level
        for label, table in tables.items()
        for level in _levels(label, table, before[label])
    }
    tripped = [row for limit in config.limits for row in _tripped(limit, levels, tables[limit.reward])]
    return {
        "iteration": request.iteration,
        "scores": {label: artifact.manifest.content for label, artifact in scores.items()},
        "first": {label: artifact.manifest.content for label, artifact in first.items()},
        "numbers": {label: {"now": _digest(tables[label]), "first": _digest(before[label])} for label in tables},
        "levels": [level.as_json() for level in levels.values()],
        "tripped": tripped,
        "undecided": [row for limit in config.limits for row in _undecided(limit, levels[limit.reward, limit.name])],
    }


def _digest(table: Any) -> str:
    """Return the digest of every number of a table, by sample and name."""
    numbers = table.drop(columns="prompt_id")
    return digest({str(sample): row.dropna().to_dict() for sample, row in numbers.iterrows()})


def _levels(label: str, now: Any, first: Any) -> Iterator[Level]:
    """Yield the level of each score that a reward gave now or in iteration 0, first the reward's own."""
    others = sorted({*now.columns, *first.columns} - {label, "prompt_id"})
    for name in (label, *others):
        yield Level(label, name, _spread(now, name), _spread(first, name))


def _spread(table: Any, name: str) -> Spread:
    known = table[name].dropna() if name in table else pd.Series(dtype="float64")
    return Spread.of(known, table["prompt_id"].reindex(known.index))


def _undecided(limit: Limit, level: Level) -> Iterator[dict[str, Any]]:
    """Yield the bounds on drift that could not be judged, because one of the two iterations has too few prompts."""
    prompts = {"now": level.now.estimate.clusters, "first": level.first.estimate.clusters}
    if min(prompts.values()) < FEWEST:
        bounds = [name for name in ("fall", "rise") if getattr(limit, name) is not None]
        yield from ({"reward": limit.reward, "score": limit.name, "bound": name, "prompts": prompts} for name in bounds)


def _tripped(limit: Limit, levels: dict[tuple[str, str], Level], table: Any) -> Iterator[dict[str, Any]]:
    """Yield a row for each bound of a limit that is exceeded, with the ids of the samples that are most extreme.

    Raises :class:`ConfigError` if the reward does not give the score.
    """
    if (level := levels.get((limit.reward, limit.name))) is None:
        known = ", ".join(score for reward, score in levels if reward == limit.reward)
        raise ConfigError(f"early_warning.limits: {limit.reward} gives no score {limit.name!r}; it gives {known}")
    for name, bound in level.exceeded(limit):
        ordered = table[limit.name].dropna().sort_values(ascending=name in ("below", "fall"), kind="stable")
        yield {
            "reward": limit.reward,
            "score": limit.name,
            "bound": name,
            "limit": bound,
            "mean": level.now.mean,
            "first": finite(level.first.mean),
            "z": finite(level.z),
            "drift": finite(level.drift),
            "samples": [[str(sample), float(score)] for sample, score in ordered.head(EXTREMES).items()],
        }
