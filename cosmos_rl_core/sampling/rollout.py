"""The one loop that turns noise into samples."""

from collections.abc import Callable

import torch
from torch import Tensor

from cosmos_rl_core.sampling.ode import Solver
from cosmos_rl_core.sampling.schedule import Schedule


@torch.no_grad()
def sample(velocity: Callable[[Tensor, Tensor], Tensor], noise: Tensor, schedule: Schedule, solver: Solver) -> Tensor:
    """Integrate ``noise`` ``[B, ...]`` down the schedule to x_0: float32, same shape and device, no gradient.

    ``velocity(x, t)`` gets the state and the noise level of each sample, ``[B]`` float32. The state stays float32
    between steps whatever type the velocity computes in.
    """
    x, history = noise.float(), None
    for step in schedule.steps:
        t = torch.full((x.shape[0],), step.sigma, dtype=torch.float32, device=x.device)
        x, history = solver(x, velocity(x, t).float(), step, history)
    return x
