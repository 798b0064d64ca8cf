"""UniPC of order 2, without noise: the scheduler of Wan."""

from collections.abc import Callable

from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.sampling import flow
from cosmos_rl_core.sampling.facts import Solver
from cosmos_rl_core.sampling.kernel import Kernel
from cosmos_rl_core.sampling.schedule import Schedule
from cosmos_rl_core.solvers._base import UNIPC

SOLVER = Solver(schedulers={"UniPCMultistepScheduler": {"solver_order": (2,), **UNIPC}})


def kernel(sample: SolverConfig, schedule: Callable[[], Schedule]) -> Kernel:
    """Return the table of steps, like :func:`cosmos_rl_core.sampling.flow.unipc`."""
    return flow.unipc(schedule())
