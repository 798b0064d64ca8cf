"""Coefficient-preserving sampling: steps with noise, which leave less noise in samples than ``flow_sde``."""

from collections.abc import Callable

from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.sampling import flow
from cosmos_rl_core.sampling.facts import Solver
from cosmos_rl_core.sampling.kernel import Kernel
from cosmos_rl_core.sampling.schedule import Schedule

SOLVER = Solver(settings=("noise_level",))


def kernel(sample: SolverConfig, schedule: Callable[[], Schedule]) -> Kernel:
    """Return the table of steps, like :func:`cosmos_rl_core.sampling.flow.cps`."""
    return flow.cps(schedule(), sample.noise_level)
