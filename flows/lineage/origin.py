"""The origin of a fork: the run that it begins in the middle of."""

from pydantic import Field

from cosmos_rl_core.config.base import NOT_IDENTITY, Section
from cosmos_rl_core.weights.parts import Anchor

MAX_DRIFT = 0.05
"""Default of the largest drift: docs/studies/what_if compares the error of what-ifs with their drift."""


class StoredRollouts(Section):
    """The way in which a fork trains on the rollouts of its origin, instead of making its own."""

    anchor: Anchor | None = None
    """Weights that a loss compares with: the run's own copy, or the weights that made the rollouts. None in a plan
    whose loss reads neither."""
    max_drift: float = Field(default=MAX_DRIFT, gt=0, json_schema_extra=NOT_IDENTITY)
    """Drift at which the fork ends: a mean squared difference of velocities, over the behaviour's own error. A later
    command may raise it."""


class Origin(Section):
    """The run and the policy version that a fork begins with."""

    run: str
    """Id of the run, which is in the same store."""
    at: int = Field(ge=0)
    """The policy version. Iterations before it are the origin's, those from it on are the fork's own."""
    optimizer_steps: int = Field(ge=0)
    """Optimizer steps that the origin planned until then. Schedules go on after them."""
    alike: bool
    """Whether scores and evaluations compare with the origin's: equal rewards, limits and validation. If not, early
    warnings and held-out numbers are compared with version ``at``."""

    stored: StoredRollouts | None = Field(default=None, json_schema_extra={"neutral": None})
    """Set if the fork trains on the rollouts of its origin and makes none."""

    @property
    def words(self) -> str:
        """Return the origin for people."""
        how = "as a fork" if self.stored is None else "trained on its rollouts"
        return f"policy {self.at} of {self.run}, {how}"
