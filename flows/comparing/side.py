"""One of two runs that are compared."""

from dataclasses import dataclass
from functools import cached_property

from flows.library.collected import Collected
from flows.library.opened_run import OpenedRun
from flows.planning.base import AnyPlan, AnyRun
from stages.reporting.book import Piece


@dataclass(frozen=True)
class Side:
    """A run, with facts that are read from it once."""

    opened: OpenedRun

    @property
    def name(self) -> str:
        """Return the run's id."""
        return self.opened.id

    @property
    def run(self) -> AnyRun:
        """Return the run: its plan and its store."""
        return self.opened.run

    @property
    def plan(self) -> AnyPlan:
        """Return the plan of the run."""
        return self.opened.run.plan

    @cached_property
    def collected(self) -> Collected:
        """Return fragments and optimizer steps of the run."""
        return self.opened.collected()

    @property
    def trained(self) -> int:
        """Return the number of iterations that are trained, which is the newest policy version."""
        return max(self.collected.trained, default=-1) + 1

    @property
    def words(self) -> str:
        """Return the algorithm and how far the run went."""
        train = self.plan.recipe.train
        return f"{train.train_policy.type}, {self.trained} of {train.num_iterations} iterations trained"


Pieces = dict[int, tuple[Piece, Piece]]


def shared(a: dict[int, Piece], b: dict[int, Piece]) -> Pieces:
    """Return pairs of fragments, by the iterations or policy versions that both runs have."""
    return {k: (a[k], b[k]) for k in sorted(a.keys() & b.keys())}
