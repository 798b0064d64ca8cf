"""The rule that ranks the policy versions of a run, from its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stages.reporting.contracts import WEIGHTED

if TYPE_CHECKING:
    from cosmos_rl_core.config.train import Gate
    from flows.planning.base import AnyRun

HELD_OUT = "held-out "
"""Prefix in the names of the numbers that rank policies."""


@dataclass(frozen=True)
class RankingRule:
    """The rule that ranks the policy versions of a run."""

    stages: tuple[str, ...]
    """The stages whose artifacts must be current, such as ``validate``."""
    by: str
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    """Rewards of a weighted sum; empty if one number of a manifest ranks."""
    gates: Mapping[str, Gate] = field(default_factory=dict[str, "Gate"])
    number: str = ""
    """Name of the number in the summary of the stage, if it is neither a loss nor a reward."""

    @property
    def of_losses(self) -> bool:
        """Return whether the lowest number is best."""
        return self.by == "held-out loss"

    @property
    def name(self) -> str:
        """Return the number as the report names it: ``loss``, a reward, ``weighted reward``, ``correct answers: x``."""
        return self.by.removeprefix(HELD_OUT)


def weights_of(run: AnyRun) -> dict[str, float]:
    """Return the weights of the rewards that train. By default their weighted sum ranks policies.

    Empty without evaluations, and if the sum equals the score of a single reward.
    """
    weights = {reward.fn.label: reward.weight for reward in run.recipe.rewards if reward.role == "train"}
    return {} if not run.evaluates or (not gates_of(run) and [*weights.values()] == [1.0]) else weights


def gates_of(run: AnyRun) -> dict[str, Gate]:
    """Return the gates that samples must pass to count in the weighted sum."""
    return {reward.fn.label: reward.gate for reward in run.recipe.rewards if reward.role == "gate"}


def ranking_rule(run: AnyRun) -> RankingRule | None:
    """Return the rule that ranks policy versions: by ``validation.best_by``, else by default; None if nothing does."""
    validation, rewards = run.recipe.validation, run.recipe.rewards
    best_by = getattr(validation, "best_by", None)
    training = [reward for reward in rewards if reward.role == "train"]
    if best_by is None and not (run.evaluates and training) and not run.validates:
        # The name of a reward, even one called `loss` or `reward`.
        label = run.headline_reward if run.evaluates else ""
        return RankingRule((f"evaluate-{label}",), f"held-out {label}") if label else None
    best_by = best_by or ("reward" if run.evaluates and training else "loss")
    if best_by == "loss":
        return RankingRule(("validate",), "held-out loss") if run.validates else None
    if best_by in getattr(validation, "datasets", ()):
        return RankingRule(("validate",), f"held-out correct answers: {best_by}", number=f"correct_{best_by}")
    if not run.evaluates:
        return None
    if best_by != "reward":
        return RankingRule((f"evaluate-{best_by}",), f"held-out {best_by}")
    if not (weights := weights_of(run)):
        return RankingRule((f"evaluate-{(label := training[0].fn.label)}",), f"held-out {label}")
    gates = gates_of(run)
    return RankingRule(
        tuple(f"evaluate-{label}" for label in (*weights, *gates)), f"{HELD_OUT}{WEIGHTED}", weights, gates
    )


def ranked_by(run: AnyRun) -> str:
    """Return the name of the number that ranks policies in the report; "" if nothing does."""
    rule = ranking_rule(run)
    return "" if rule is None else rule.name
