"""The best policy version of a run, from the artifacts that judge its versions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flows.planning.run import Run
    from flows.watching.status import State


@dataclass(frozen=True)
class Best:
    """The best policy version, and its number."""

    k: int
    stage: str
    """The stage that judges, such as ``validate``."""
    by: str
    """``held-out loss``, whose lowest is best, or ``held-out <reward>``, whose highest is best."""
    figure: float

    def __str__(self) -> str:
        return f"policy {self.k}, {self.by} {self.figure:.4g}"


def judge_of(run: Run) -> tuple[str, str] | None:
    """Return the stage that judges policy versions and what its number is called; None if none does."""
    if run.validates:
        return "validate", "held-out loss"
    reward = run.headline_reward
    return (f"evaluate-{reward}", f"held-out {reward}") if run.evaluates and reward else None


def best_of(run: Run, found: Iterable[State]) -> Best | None:
    """Return the version with the lowest held-out loss or, in a run without it, with the highest headline reward.

    Only numbers that stand count. Of equal ones the earliest is best. None if there are none.
    """
    if (judge := judge_of(run)) is None:
        return None
    stage, by = judge
    stands = [state for state in found if state.step.stage == stage and state.word == "stands"]
    numbers = [(state.loss if run.validates else state.reward, state.step.k) for state in stands]
    known = [(number, k) for number, k in numbers if number is not None and math.isfinite(number) and k is not None]
    if not known:
        return None
    figure, k = min(known, key=lambda pair: pair if run.validates else (-pair[0], pair[1]))
    return Best(k, stage, by, figure)
