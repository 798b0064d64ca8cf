"""Rewards, losses and answers of two runs."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from flows.comparing.side import Side, shared
from stages.reporting.numbers import Estimate

LOSSES = "val/"
"""Prefix of the names of numbers on held-out data in ``metrics.jsonl``."""
ERRORS = ("_standard_error", "_error")
"""Endings of the names of their standard errors."""


@dataclass(frozen=True)
class Difference:
    """A mean in both runs, and the difference B - A."""

    name: str
    where: str
    """Such as ``held-out, policy 6`` or ``training, iteration 5``."""
    a: Estimate
    b: Estimate
    change: Estimate
    how: str
    """Whether the difference was taken sample by sample, which leaves out how samples differ among themselves."""

    @classmethod
    def independent(cls, name: str, where: str, a: Estimate, b: Estimate, how: str = "independent means") -> Self:
        """Return the difference of two means whose samples have nothing to do with each other."""
        change = Estimate(b.mean - a.mean, math.hypot(a.error, b.error), min(a.n, b.n))
        return cls(name, where, a, b, change, how)


def differences(a: Side, b: Side) -> list[Difference]:
    """Return the difference of every reward and held-out number, at the newest place that both runs have."""
    return [*_rewards(a, b), *_losses(a, b), *_training(a, b)]


def _rewards(a: Side, b: Side) -> Iterator[Difference]:
    """Yield the held-out rewards of the newest policy version that both runs judged, sample by sample."""
    judged = shared(a.collected.judged, b.collected.judged)
    if not judged or not a.run.evaluates or not b.run.evaluates:
        return
    version = max(judged)
    tables = [one.opened.held_out(version).set_index("sample_id") for one in (a, b)]
    labels = [reward.fn.label for reward in a.plan.recipe.rewards]
    for label in labels:
        if all(label in table for table in tables):
            yield _by_sample(label, f"held-out, policy {version}", *tables)


def _by_sample(label: str, where: str, a: Any, b: Any) -> Difference:
    both = a[[label, "noise_seed", "prompt_id"]].merge(b[[label, "noise_seed"]], on="sample_id", suffixes=(".a", ".b"))
    before, after = Estimate.of(a[label]), Estimate.of(b[label])
    if both.empty:
        return Difference.independent(label, where, before, after, "other prompts")
    same = both["noise_seed.a"].eq(both["noise_seed.b"]).all()
    how = "sample by sample" if same else "prompt by prompt, other seeds"
    change = Estimate.of(both[f"{label}.b"] - both[f"{label}.a"], both["prompt_id"])
    return Difference(label, where, before, after, change, how)


def _losses(a: Side, b: Side) -> Iterator[Difference]:
    """Yield what `validate` measured on the newest policy version that both runs judged."""
    tables = [one.opened.metrics() for one in (a, b)]
    if any("policy_version" not in table for table in tables):
        return
    rows = [table[table["stage"] == "validate"].set_index("policy_version") for table in tables]
    both = rows[0].index.intersection(rows[1].index)
    if both.empty:
        return
    version = max(both)
    names = [name for name in rows[0] if name.startswith(LOSSES) and not name.endswith((*ERRORS, "seconds"))]
    for name in names:
        if name in rows[1]:
            before, after = (_estimate(one.loc[version], name) for one in rows)
            if math.isfinite(before.mean) and math.isfinite(after.mean):
                yield Difference.independent(name, f"held-out, policy {version}", before, after)


def _estimate(row: Any, name: str) -> Estimate:
    error = next((float(row[name + ending]) for ending in ERRORS if name + ending in row), math.nan)
    return Estimate(float(row[name]), error, 0)


def _training(a: Side, b: Side) -> Iterator[Difference]:
    """Yield the rewards of the newest rollout of both runs."""
    both = shared(a.collected.iterations, b.collected.iterations)
    if not both:
        return
    k = max(both)
    for score in both[k][0].excerpt.scores:
        before, after = (piece.estimate(score.reward, score.score) for piece in both[k])
        if before.n and after.n:
            yield Difference.independent(score.name, f"training, iteration {k}", before, after)
