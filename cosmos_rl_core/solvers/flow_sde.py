"""The SDE of FlowGRPO: every step adds noise."""

from collections.abc import Callable

from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.sampling import flow
from cosmos_rl_core.sampling.facts import Solver
from cosmos_rl_core.sampling.kernel import Kernel
from cosmos_rl_core.sampling.schedule import Schedule

SOLVER = Solver(settings=("noise_level",))


def kernel(sample: SolverConfig, schedule: Callable[[], Schedule]) -> Kernel:
    """Return the table of steps, like :func:`cosmos_rl_core.sampling.flow.flow_sde`."""
    return flow.flow_sde(schedule(), sample.noise_level)
