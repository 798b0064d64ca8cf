"""DPM-Solver++ 2M, without noise: the scheduler of SANA."""

from collections.abc import Callable

from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.sampling import flow
from cosmos_rl_core.sampling.facts import Solver
from cosmos_rl_core.sampling.kernel import Kernel
from cosmos_rl_core.sampling.schedule import Schedule
from cosmos_rl_core.solvers._base import DPM

SOLVER = Solver(
    schedulers={
        # euler_at_final and lower_order_final change nothing: the last step, to sigma = 0, is always first order.
        "DPMSolverMultistepScheduler": {
            "solver_order": (2,),
            "solver_type": ("midpoint", "logrho", "bh1", "bh2"),
            **DPM,
        }
    }
)


def kernel(sample: SolverConfig, schedule: Callable[[], Schedule]) -> Kernel:
    """Return the table of steps, like :func:`cosmos_rl_core.sampling.flow.dpm2`."""
    return flow.dpm2(schedule())
