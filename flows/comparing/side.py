"""One of two runs that are compared."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

from flows.library.opened_run import OpenedRun, run_at
from flows.planning.plan import Plan
from flows.planning.run import Run
from flows.reporting.collecting import Collected
from stages.reporting.book import Piece


@dataclass(frozen=True)
class Side:
    """A run, and what was read of it."""

    run: Run

    @classmethod
    def open(cls, run: str, store: str) -> Self:
        """Open a run by its id, or by its URL. Raises :class:`ConfigError` if there is none."""
        return cls(run_at(run, store))

    @property
    def name(self) -> str:
        """Return the run's id."""
        return self.run.plan.run_id

    @property
    def plan(self) -> Plan:
        """Return the plan of the run."""
        return self.run.plan

    @property
    def opened(self) -> OpenedRun:
        """Return the run as the library reads it."""
        return OpenedRun(self.run)

    @cached_property
    def collected(self) -> Collected:
        """Return fragments and optimizer steps of the run."""
        found = Collected(self.run)
        found.fill()
        return found

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
    """Return the fragments of both runs by the iterations, or the policy versions, that both have."""
    return {k: (a[k], b[k]) for k in sorted(a.keys() & b.keys())}
