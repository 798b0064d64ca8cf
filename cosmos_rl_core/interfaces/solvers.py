"""Names that a solver plugin imports: the type of its description, and the table of steps that it returns."""

from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.sampling.facts import Alike, Solver
from cosmos_rl_core.sampling.kernel import Kernel, Step
from cosmos_rl_core.sampling.schedule import Schedule
from cosmos_rl_core.solvers._base import MakesKernel

__all__ = ["Alike", "Kernel", "MakesKernel", "Schedule", "Solver", "SolverConfig", "Step"]
