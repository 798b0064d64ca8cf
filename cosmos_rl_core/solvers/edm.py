"""The sampler with churn of Cosmos-RL's world models, on a grid of sigmas of its own."""

from collections.abc import Callable

from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.sampling import edm
from cosmos_rl_core.sampling.facts import Solver
from cosmos_rl_core.sampling.kernel import Kernel
from cosmos_rl_core.sampling.schedule import Schedule

SOLVER = Solver(
    settings=("sigma_max", "sigma_min", "s_churn", "s_noise", "s_t_min", "s_t_max", "solver_option"), own_levels=True
)


def kernel(sample: SolverConfig, schedule: Callable[[], Schedule]) -> Kernel:
    """Return the table of steps, like :func:`cosmos_rl_core.sampling.edm.edm`; ``schedule`` is not called."""
    del schedule
    return edm.edm(sample)
