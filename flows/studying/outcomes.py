"""Held-out numbers of the runs of a study, and differences between them, with errors."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.estimates.estimate import Estimate, Sums, mean_of_independent
from flows.forking.plan import judged_by
from flows.library.best import judged
from flows.planning.base import AnyRun
from flows.planning.ranking import ranking_rule
from flows.planning.steps import read_run
from flows.studying.study import Member, Study
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import current_of, input_of
from stages.formats.tables import read_table

VALUE = "value"
"""Column of the number that ranks policies, of each held-out sample."""


@dataclass(frozen=True)
class Outcome:
    """The held-out numbers of a run."""

    member: Member
    by: str
    """Name of the number that ranks its policies."""
    figures: dict[int, float]
    """The number that ranks, of each judged policy version."""
    first: int
    """Policy version that the run began with."""
    judged_by: str
    """Digest of all that decides whether its numbers compare with another run's."""
    drifts: dict[int, float]
    """Drift from the behaviour before each update on rollouts that its own policy did not make."""
    samples: Any = None
    """Table of the held-out samples of its last judged version, by id: ``value``, NaN for a sample that does not
    count, and ``prompt_id``; None if a loss or correct answers rank."""

    @property
    def last(self) -> int | None:
        """Return the last judged policy version of the run."""
        return max(self.figures, default=None)

    @property
    def estimate(self) -> Estimate:
        """Return the number of the last judged version, with its error over prompts."""
        if self.samples is None:
            return Estimate.missing() if self.last is None else Estimate(self.figures[self.last], math.nan, 1, 1)
        return Sums.of(self.samples[VALUE], self.samples["prompt_id"]).estimate


def outcomes_of(study: Study, store_url: str) -> list[Outcome]:
    """Return the outcome of each run; runs that have no plan or no number yet are left out."""
    return [one for member in study.members if (one := _outcome(store_url, member, study.until)) is not None]


def _outcome(store_url: str, member: Member, until: int) -> Outcome | None:
    try:
        run = read_run(store_url, member.run)
    except (ConfigError, ArtifactError):
        return None
    # A longer study may share the run.
    ks = range(min(until, run.recipe.train.num_iterations) + 1)
    made = {k: found for k in ks if (found := current_of(run.slots.policy(k))[1]) is not None}
    best = {k: one for k in ks if run.plan.baseline <= k and (one := judged(run, k)) is not None}
    if not best:
        return None
    drifts = {k - 1: drift for k, one in made.items() if isinstance(drift := one.summary.get("drift"), float)}
    return Outcome(
        member=member,
        by=best[max(best)].by,
        figures={k: one.figure for k, one in best.items()},
        first=run.plan.first,
        judged_by=digest(judged_by(run.plan)),
        drifts=drifts,
        samples=_samples(run, max(best)),
    )


def _samples(run: AnyRun, k: int) -> Any:
    """Return the held-out samples of a policy version by id; None if it is ranked by a loss."""
    rule = ranking_rule(run)
    if rule is None or rule.of_losses or rule.number or not run.evaluates:
        return None
    weights = rule.weights or {rule.name: 1.0}
    tables = {label: _scores(run, k, label) for label in (*weights, *rule.gates)}
    columns = {label: table["score"].where(table["valid"]) for label, table in tables.items()}
    value: Any = sum(weight * columns[label] for label, weight in weights.items())
    for label, gate in rule.gates.items():
        passes = columns[label].map(lambda score, gate=gate: gate.why_not(score) is None)
        value = value.where(columns[label].notna() & passes)
    prompt_ids = tables[next(iter(weights))]["prompt_id"]
    return pd.DataFrame({VALUE: value.astype("float64"), "prompt_id": prompt_ids})


def _scores(run: AnyRun, k: int, label: str) -> Any:
    slot = run.slots.version(k, f"evaluate-{label}")
    return read_table(Artifact(input_of(slot)), contracts.Reward.SCORES).set_index("sample_id")


def against(outcome: Outcome, others: Sequence[Outcome], *, by_chance: bool = False) -> Estimate:
    """Return by how much a run's number is above the mean of others, paired by held-out samples that count in all.

    The error is over prompts; it is NaN for runs that are not ranked by scores of samples, but for example by a loss.
    With ``by_chance`` the others differ from each other by chance alone, and this run would be like them if its rewards
    taught nothing: their variance is added once for this run and once for their mean; NaN with a single other run.
    Missing without others that were judged alike, at the same version.
    """
    same = [one for one in others if alike(one, outcome) and one.last == outcome.last and one.last is not None]
    if not same or outcome.last is None:
        return Estimate.missing()
    if any(one.samples is None for one in (outcome, *same)):
        mean = math.fsum(one.figures[outcome.last] for one in same) / len(same)
        return Estimate(outcome.figures[outcome.last] - mean, math.nan, 1, 1)
    columns = pd.concat([one.samples[VALUE] for one in same], axis=1, join="inner").dropna()
    both = outcome.samples.join(columns.mean(axis=1).rename("mean"), how="inner").dropna()
    if both.empty:
        return Estimate.missing()
    found = Sums.of(both[VALUE] - both["mean"], both["prompt_id"]).estimate
    return found.by_chance([float(mean) for mean in columns.loc[both.index].mean(axis=0)]) if by_chance else found


def alike(one: Outcome, other: Outcome) -> bool:
    """Return whether two runs can be compared: they have equal rewards, weights, gates and held-out samples."""
    return (one.by, one.judged_by) == (other.by, other.judged_by)


def paired(setting: Sequence[Outcome], other: Sequence[Outcome]) -> Estimate:
    """Return by how much a setting is above another one at the version that both reached, paired by seeds."""
    mine, theirs = ({one.member.seed: one for one in some} for some in (setting, other))
    moved = [
        mine[seed].figures[k] - theirs[seed].figures[k]
        for seed in sorted(mine.keys() & theirs.keys())
        if alike(mine[seed], theirs[seed])
        for k in [max(mine[seed].figures.keys() & theirs[seed].figures.keys(), default=0)]
        # At their first version, all runs are equal.
        if k > mine[seed].first
    ]
    return mean_of_independent(moved) if moved else Estimate.missing()


def difference(setting: Sequence[Outcome], other: Sequence[Outcome]) -> Estimate:
    """Return by how much a setting is above another one: of single runs paired by samples, of several by seeds."""
    single = len(setting) == len(other) == 1
    return against(setting[0], other) if single else paired(setting, other)


def curves(outcomes: Sequence[Outcome]) -> Iterator[tuple[int, Estimate]]:
    """Yield the mean over runs of each policy version that all of them judged, with its error over seeds."""
    common = set.intersection(*(set(one.figures) for one in outcomes)) if outcomes else set[int]()
    for k in sorted(common):
        yield k, mean_of_independent([one.figures[k] for one in outcomes])
