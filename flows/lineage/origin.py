"""The origin of a fork: the run that it begins in the middle of."""

from pydantic import Field

from cosmos_rl_core.config.base import Section


class Origin(Section):
    """The run and the policy version that a fork begins with."""

    run: str
    """Its id, in the same store."""
    at: int = Field(ge=0)
    """The policy version. Iterations before it are the origin's, those from it on are the fork's own."""
    optimizer_steps: int = Field(ge=0)
    """Optimizer steps that the origin planned until then. Schedules go on after them."""
    alike: bool
    """Whether scores and evaluations compare with the origin's: equal rewards, limits and validation. If not, early
    warnings and held-out numbers are compared with version ``at``."""

    @property
    def words(self) -> str:
        """Return the origin for people."""
        return f"policy {self.at} of {self.run}, as a fork"
