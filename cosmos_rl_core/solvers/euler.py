"""First order, without noise: the scheduler of SD3."""

from collections.abc import Callable

from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.sampling import flow
from cosmos_rl_core.sampling.facts import Solver
from cosmos_rl_core.sampling.kernel import Kernel
from cosmos_rl_core.sampling.schedule import Schedule
from cosmos_rl_core.solvers._base import DPM

SOLVER = Solver(
    schedulers={
        "FlowMatchEulerDiscreteScheduler": {"stochastic_sampling": (False,)},
        "DPMSolverMultistepScheduler": {"solver_order": (1,), **DPM},
    }
)


def kernel(sample: SolverConfig, schedule: Callable[[], Schedule]) -> Kernel:
    """Return the table of steps, like :func:`cosmos_rl_core.sampling.flow.euler`."""
    return flow.euler(schedule())
