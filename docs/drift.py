"""Drift of the monitored statistics of finished runs since iteration 0, stored in ``docs/measured``."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cosmos_rl_core.config.early_warning import DEFAULTS, STATISTICS
from flows.planning.base import AnyRun
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.contracts import Warn

HACKED = "jpeg"
"""The reward for small files, for which a policy ruins its pictures."""
TRIED = 5.0
"""A limit in standard errors that is tighter than the default, for comparison."""


@dataclass(frozen=True)
class Drift:
    """Drift of every statistic in every iteration after the first, in standard errors of the difference."""

    rewards: list[str]
    by_statistic: dict[str, list[float]]

    @classmethod
    def read(cls, file: Path) -> "Drift":
        """Return the drift that :func:`store` wrote to a file."""
        found = json.loads(file.read_text(encoding="utf-8"))
        return cls(found["rewards"], {name: [*map(float, text.split())] for name, text in found["drift"].items()})

    @property
    def hacked(self) -> bool:
        """Return whether the run was rewarded for ruined pictures."""
        return HACKED in self.rewards


def store(folder: Path, run: AnyRun) -> Path:
    """Write the drift of a finished run whose iterations all have the stage ``warn``, and return the file."""
    train, found = run.recipe.train, dict[str, list[float]]()
    for k in range(1, train.num_iterations):
        made = Artifact(input_of(run.slots.iteration(k, "warn")))
        for level in made.json(Warn.EVIDENCE)["levels"]:
            if level["reward"] == STATISTICS and level["score"] in DEFAULTS:
                found.setdefault(level["score"], []).append(level["drift"])
    rewards = [reward.fn.label for reward in run.recipe.rewards]
    name = "-".join([train.train_policy.type, *rewards, str(train.seed)])
    about = {"algorithm": train.train_policy.type, "rewards": rewards, "seed": train.seed}
    drift = {score: " ".join(f"{one:.3f}" for one in some) for score, some in found.items()}
    path = folder / f"drift-{name}.json"
    path.write_text(json.dumps(about | {"drift": drift}, indent=1) + "\n", encoding="utf-8")
    return path


def rows(runs: Sequence[Drift]) -> Iterator[list[str]]:
    """Yield the cells of each statistic: drift and false alarms of honest runs, first alarm of the hacked run."""
    honest, (hacked,) = [run for run in runs if not run.hacked], [run for run in runs if run.hacked]
    table = []
    for name, bounds in DEFAULTS.items():
        if name not in hacked.by_statistic:
            continue
        own = [_towards(bounds, one) for run in honest for one in run.by_statistic[name]]
        alarms = [f"{sum(one > most for one in own)} of {len(own)}" for most in (TRIED, *{*bounds.values()})]
        there = [_towards(bounds, one) for one in hacked.by_statistic[name]]
        first = next((k for k, one in enumerate(there, 1) if one > max(bounds.values())), None)
        last = hacked.by_statistic[name][-1]
        cells = [name.replace("_", " "), f"{max(own):.1f}", *alarms, "none" if first is None else f"iteration {first}"]
        table.append((first or math.inf, [*cells, f"{last:+.3g}".replace("-", "−")]))
    yield from (cells for _, cells in sorted(table, key=lambda row: row[0]))


def _towards(bounds: dict[str, float], drift: float) -> float:
    """Return the part of a drift that goes in a direction with a bound; -inf without one."""
    return max(drift if "rise" in bounds else -math.inf, -drift if "fall" in bounds else -math.inf)
