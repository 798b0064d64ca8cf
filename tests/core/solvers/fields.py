"""Velocities whose samples are known, and where schedulers of diffusers take them."""

from collections.abc import Callable
from typing import Any

import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from cosmos_rl_core.sampling.kernel import Kernel
from cosmos_rl_core.sampling.schedule import Schedule, schedule_of

CPU = torch.device("cpu")
SD3_SHIFT = 3.0
FLOW: dict[str, Any] = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
Builder = Callable[[Schedule], Kernel]


def sd3_schedule(num_steps: int) -> Schedule:
    return schedule_of(FlowMatchEulerDiscreteScheduler(shift=SD3_SHIFT), num_steps)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator(device=CPU).manual_seed(0), device=CPU)


def curved_velocity(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return torch.sin(3 * x) + x * t.view(-1, *[1] * (x.dim() - 1))


def by_diffusers(scheduler: Any, num_steps: int, x: torch.Tensor) -> torch.Tensor:
    """Where the scheduler takes ``x`` along that velocity, on its own levels."""
    scheduler.set_timesteps(num_steps)
    if not type(scheduler).__name__.startswith("FlowMatch"):
        scheduler.timesteps = torch.arange(num_steps, device=CPU)  # only looked up, and must not repeat
    for t, sigma in zip(scheduler.timesteps, scheduler.sigmas, strict=False):
        x = scheduler.step(curved_velocity(x, sigma.expand(len(x))), t, x, return_dict=False)[0]
    return x


def gaussian_velocity(std: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The exact velocity field of data that is normal with mean 0 and this deviation."""

    def velocity(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        level = t.view(-1, 1)
        variance = (1 - level) ** 2 * std**2 + level**2
        return x * (level - (1 - level) * std**2) / variance

    return velocity
