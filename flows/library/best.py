"""The best policy version of a run, from the artifacts that rank its versions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from flows.planning.ranking import RankingRule, ranking_rule
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.slots import current_of, input_of
from stages.scoring.summaries import known_error

if TYPE_CHECKING:
    from cosmos_rl_core.config.train import Gate
    from flows.library.states import State
    from flows.planning.base import AnyRun


class Measured(NamedTuple):
    """A measurement of a policy version by a stage."""

    slot: str
    manifest: Manifest

    def number(self, name: str) -> float | None:
        """Return a number of its summary by name; None if the summary lacks it."""
        found = self.manifest.summary.get(name)
        return found if isinstance(found, float) else None


@dataclass(frozen=True)
class Best:
    """The best policy version, and its number."""

    k: int
    by: str
    """Name of the number that ranks: ``held-out loss``, whose lowest value is best; or ``held-out <reward>`` or
    ``held-out correct answers: <dataset>``, whose highest value is best."""
    figure: float
    standard_error: float | None = None
    """Standard error of ``figure`` over prompts or items; None for a weighted sum, and if it was not recorded."""
    rewards: dict[str, float] = field(default_factory=dict[str, float])
    """The mean held-out score of every reward of the recipe."""
    passed: tuple[int, int] | None = None
    """The number of held-out samples that count, which pass every gate and have a score by every reward of the sum; and
    the number of all. None without a weighted sum."""

    def __str__(self) -> str:
        said = [f"{name} {mean:.4g}" for name, mean in self.rewards.items()] if len(self.rewards) > 1 else []
        said += [] if self.passed is None else ["{} of {} samples count".format(*self.passed)]
        return f"policy {self.k}, {self.by} {self.figure:.4g}" + (f" ({', '.join(said)})" if said else "")


def best_of(run: AnyRun, found: Iterable[State]) -> Best | None:
    """Return the best version by :func:`ranking_rule`: the lowest loss, or the highest reward.

    Only current numbers count. A version without a sample that counts has no weighted sum. If several versions are
    equal, the earliest is best. None if there are none.
    """
    by_version: dict[int, dict[str, Measured]] = {}
    for state in found:
        if state.word == "stands" and state.step.k is not None and state.manifest is not None:
            measured = Measured(state.step.slot, state.manifest)
            by_version.setdefault(state.step.k, {})[state.step.stage] = measured
    return best_among(run, by_version)


def best_among(run: AnyRun, by_version: Mapping[int, Mapping[str, Measured]]) -> Best | None:
    """Return the best version, like :func:`best_of`, from the measurements of each version by the names of stages."""
    if (rule := ranking_rule(run)) is None:
        return None
    labels = [reward.fn.label for reward in run.recipe.rewards]
    ranked = [
        one
        for k, measured in sorted(by_version.items())
        if all(stage in measured for stage in rule.stages)
        if (one := _judged(k, rule, labels, measured)) is not None
    ]
    return min(ranked, key=lambda one: (one.figure if rule.of_losses else -one.figure, one.k), default=None)


def judged(run: AnyRun, k: int) -> Best | None:
    """Return the number that ranks policy version k, and each of its held-out rewards, from its newest manifests.

    None if it has none. Nothing checks whether the stages that made them are up to date.

    Raises :class:`ArtifactError` for damaged manifests.
    """
    if (rule := ranking_rule(run)) is None:
        return None
    labels = [reward.fn.label for reward in run.recipe.rewards]
    rewards = [f"evaluate-{label}" for label in labels if run.evaluates]
    found: dict[str, Measured] = {}
    for stage in dict.fromkeys((*rule.stages, *rewards)):
        slot = run.slots.version(k, stage)
        if (manifest := current_of(slot)[1]) is not None:
            found[stage] = Measured(slot, manifest)
    return _judged(k, rule, labels, found) if all(stage in found for stage in rule.stages) else None


def _judged(k: int, rule: RankingRule, labels: Sequence[str], found: Mapping[str, Measured]) -> Best | None:
    """Return the number of a policy version; None if it is not finite."""
    scored = {label: one.number(label) for label in labels if (one := found.get(f"evaluate-{label}")) is not None}
    rewards = {label: mean for label, mean in scored.items() if mean is not None}
    passed, error = None, None
    if rule.weights:
        digests = tuple((found[stage].slot, found[stage].manifest.digest) for stage in rule.stages)
        figure, *counts = _weighted(digests, tuple(rule.weights.items()), tuple(rule.gates.items()))
        passed = counts[0], counts[1]
    else:
        (stage,) = rule.stages
        name = "loss" if rule.of_losses else rule.number or stage.removeprefix("evaluate-")
        figure, error = found[stage].number(name), known_error(found[stage].manifest)
    if figure is None or not math.isfinite(figure):
        return None
    return Best(k, rule.by, figure, error, rewards, passed)


@lru_cache(maxsize=4096)
def _weighted(
    scores: tuple[tuple[str, str], ...], weights: tuple[tuple[str, float], ...], gates: tuple[tuple[str, Gate], ...]
) -> tuple[float, int, int]:
    """Return the mean weighted sum of scores over samples that pass every gate, their number, and the number of all.

    ``scores`` are the slots and digests of the scores of each reward and gate. A sample that one of them could not
    score does not count. Digests name the bytes, so what was read once need not be read again.
    """
    # Imported here, so that a status without a weighted sum is shown at once.
    pd, names = import_module("pandas"), [name for name, _ in (*weights, *gates)]
    columns = {name: _scores(slot) for name, (slot, _) in zip(names, scores, strict=True)}
    table: Any = pd.DataFrame(columns)
    counts = table.notna().all(axis=1)
    for name, gate in gates:
        counts &= table[name].map(lambda score, gate=gate: gate.why_not(score) is None)
    total = sum(weight * table.loc[counts, name] for name, weight in weights)
    return float(pd.Series(total, dtype="float64").mean()), int(counts.sum()), len(table)


def _scores(slot: str) -> Any:
    """Return the valid scores by sample; NaN for others."""
    table: Any = (
        import_module("stages.formats.tables")
        .read_table(Artifact(input_of(slot)), contracts.Reward.SCORES)
        .set_index("sample_id")
    )
    return table["score"].astype("float64").where(table["valid"])
