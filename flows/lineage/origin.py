"""The origin of a fork: the run that it begins in the middle of."""

from pydantic import Field

from cosmos_rl_core.config.base import NOT_IDENTITY, Section
from cosmos_rl_core.weights.parts import Anchor

MAX_DRIFT = 0.05
"""Default of ``max_drift``. docs/studies/what_if compares the error of what-ifs with their drift."""


class StoredRollouts(Section):
    """The way in which a fork trains on the rollouts of its origin, instead of making its own."""

    anchor: Anchor | None = None
    """Weights with which a loss compares: the run's own copy, or the weights that made the rollouts. None in a plan
    whose loss reads neither."""
    max_drift: float = Field(default=MAX_DRIFT, gt=0, json_schema_extra=NOT_IDENTITY)
    """Drift at which the fork ends: a mean squared difference of velocities, over the behaviour's own error. A later
    command may raise it."""


class Origin(Section):
    """The run and the policy version that a fork begins with."""

    run: str
    """Id of the run, which is in the same store."""
    at: int = Field(ge=0)
    """The policy version. Earlier iterations belong to the origin; iteration ``at`` and later ones to the fork."""
    optimizer_steps: int = Field(ge=0)
    """Number of optimizer steps that the origin planned before ``at``. Schedules continue after them."""
    alike: bool
    """Whether rewards, limits and validation equal the origin's, so that early warnings and held-out numbers are
    compared with its policy 0. If not, they are compared with version ``at``."""

    stored: StoredRollouts | None = Field(default=None, json_schema_extra={"neutral": None})
    """Set if the fork trains on the rollouts of its origin and makes none."""

    @property
    def words(self) -> str:
        """Return the origin in words, such as ``policy 3 of base, as a fork``."""
        how = "as a fork" if self.stored is None else "trained on its rollouts"
        return f"policy {self.at} of {self.run}, {how}"
