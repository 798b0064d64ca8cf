"""The best policy version of a run, from the artifacts that judge its versions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from flows.planning.ranking import Judge, judge_of
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of

if TYPE_CHECKING:
    from cosmos_rl_core.config.train import Gate
    from flows.planning.run import Run
    from flows.watching.states import State


@dataclass(frozen=True)
class Best:
    """The best policy version, and its number."""

    k: int
    by: str
    """``held-out loss``, whose lowest is best; or ``held-out <reward>`` or ``held-out correct answers: <dataset>``, of
    which the highest is best."""
    figure: float
    rewards: dict[str, float] = field(default_factory=dict[str, float])
    """The mean held-out score of every reward of the recipe."""
    passed: tuple[int, int] | None = None
    """Held-out samples that pass every gate and that every reward of the sum scored, and all; None without a sum."""

    def __str__(self) -> str:
        said = [f"{name} {mean:.4g}" for name, mean in self.rewards.items()] if len(self.rewards) > 1 else []
        said += [] if self.passed is None else ["{} of {} samples count".format(*self.passed)]
        return f"policy {self.k}, {self.by} {self.figure:.4g}" + (f" ({', '.join(said)})" if said else "")


def best_of(run: Run, found: Iterable[State]) -> Best | None:
    """Return the best version by :func:`judge_of`: the lowest loss, or the highest reward.

    Only numbers that stand count, and of a weighted sum only versions with a sample that counts. Of equal ones the
    earliest is best. None if there are none.
    """
    if (judge := judge_of(run)) is None:
        return None
    by_version: dict[int, dict[str, State]] = {}
    for state in found:
        if state.word == "stands" and state.step.k is not None:
            by_version.setdefault(state.step.k, {})[state.step.stage] = state
    labels = [reward.fn.label for reward in run.recipe.rewards]
    ranked = [
        one
        for k, stood in sorted(by_version.items())
        if all(stage in stood for stage in judge.stages)
        if (one := _judged(k, judge, labels, stood)) is not None
    ]
    return min(ranked, key=lambda one: (one.figure if judge.of_losses else -one.figure, one.k), default=None)


def _judged(k: int, judge: Judge, labels: Sequence[str], stood: Mapping[str, State]) -> Best | None:
    """Return the number of a policy version; None if it is not finite."""
    scored = {label: state.reward for label in labels if (state := stood.get(f"evaluate-{label}")) is not None}
    rewards = {label: mean for label, mean in scored.items() if mean is not None}
    passed = None
    if judge.weights:
        digests = [_key(stood[stage]) for stage in judge.stages]
        figure, *counts = _weighted(tuple(digests), tuple(judge.weights.items()), tuple(judge.gates.items()))
        passed = counts[0], counts[1]
    else:
        (state,) = (stood[stage] for stage in judge.stages)
        figure = state.loss if judge.of_losses else _number(state, judge.number) if judge.number else state.reward
    if figure is None or not math.isfinite(figure):
        return None
    return Best(k, judge.by, figure, rewards, passed)


def _number(state: State, name: str) -> float | None:
    """Return a number of the summary of what a stage made; None if it has none of that name."""
    found = None if state.manifest is None else state.manifest.summary.get(name)
    return found if isinstance(found, float) else None


def _key(state: State) -> tuple[str, str]:
    assert state.manifest is not None, "it stands"
    return state.step.slot, state.manifest.digest


@lru_cache(maxsize=4096)
def _weighted(
    scores: tuple[tuple[str, str], ...], weights: tuple[tuple[str, float], ...], gates: tuple[tuple[str, Gate], ...]
) -> tuple[float, int, int]:
    """Return the weighted sum of scores, its mean over samples that pass every gate, their number, and that of all.

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
