"""The members of a solver, ``SOLVER`` and ``kernel``, and settings that several solvers share."""

from collections.abc import Callable
from typing import Protocol

from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.sampling.facts import Alike
from cosmos_rl_core.sampling.kernel import Kernel
from cosmos_rl_core.sampling.schedule import Schedule


class MakesKernel(Protocol):
    """The function ``kernel`` of a solver."""

    def __call__(self, sample: SolverConfig, schedule: Callable[[], Schedule]) -> Kernel:
        """Return the table of steps. ``schedule`` returns the pipeline's ``num_steps`` noise levels and a final 0.

        Raises :class:`ConfigError` if the settings contradict each other.
        """
        ...


DPM: Alike = {"algorithm_type": ("dpmsolver++",), "thresholding": (False,)}
"""Settings that a ``DPMSolverMultistepScheduler`` of any order must have to be reproduced here."""
UNIPC: Alike = {
    # With bh1 the last step, to sigma = 0, is NaN.
    "solver_type": ("bh2", "midpoint", "heun", "logrho"),
    "predict_x0": (True,),
    "thresholding": (False,),
    "lower_order_final": (True,),
    "disable_corrector": ([],),
    "solver_p": (None,),
}
"""Settings that a ``UniPCMultistepScheduler`` of any order must have to be reproduced here. Names of DPM-Solver's types
are among them because the two classes read each other's files."""
