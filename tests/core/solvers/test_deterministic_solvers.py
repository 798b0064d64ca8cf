"""Solvers without noise, against diffusers and closed forms."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

from cosmos_rl_core.sampling.flow import dpm2, euler, unipc
from cosmos_rl_core.sampling.rollout import sample
from cosmos_rl_core.sampling.schedule import Schedule, schedule_of
from tests.core.solvers.fields import (
    CPU,
    FLOW,
    SD3_SHIFT,
    Builder,
    by_diffusers,
    curved_velocity,
    gaussian_velocity,
    noise,
    sd3_schedule,
)


@pytest.mark.parametrize("build", [euler, dpm2, unipc])
def test_a_kernel_has_one_deterministic_step_for_each_level_but_the_last(build: Builder):
    kernel = build(Schedule((1.0, 0.25, 0.0)))
    assert [(step.index, step.t, step.input_scale, step.std) for step in kernel.steps] == [
        (0, 1, 1, 0),
        (1, 0.25, 1, 0),
    ]
    assert (kernel.sigmas, kernel.trainable) == ((1.0, 0.25, 0.0), ())


@pytest.mark.parametrize("num_steps", [1, 2, 10, 20])
def test_euler_equals_diffusers(num_steps: int):
    x = noise(3, 5)
    ours = sample(curved_velocity, x, euler(sd3_schedule(num_steps))).latents
    stock = by_diffusers(FlowMatchEulerDiscreteScheduler(shift=SD3_SHIFT), num_steps, x)
    assert torch.allclose(ours, stock, rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 10, 20])
@pytest.mark.parametrize("grid", ["sd3", "own"])
def test_dpm2_equals_diffusers_on_the_same_levels(num_steps: int, grid: str):
    """Up to the rounding of diffusers, which computes in float32 and ends up to 1.4e-6 from a float64 run."""
    scheduler: Any = DPMSolverMultistepScheduler(flow_shift=SD3_SHIFT, **FLOW)
    x = noise(3, 5)
    scheduler.set_timesteps(num_steps)
    schedule = sd3_schedule(num_steps) if grid == "sd3" else schedule_of(scheduler, num_steps)
    scheduler.sigmas = torch.tensor(schedule.sigmas, dtype=torch.float32, device=CPU)
    scheduler.timesteps = torch.arange(num_steps, device=CPU)  # only looked up, and must not repeat
    ours = sample(curved_velocity, x, dpm2(schedule)).latents
    for t, sigma in zip(scheduler.timesteps, scheduler.sigmas, strict=False):
        x = scheduler.step(curved_velocity(x, sigma.expand(3)), t, x, return_dict=False)[0]
    assert torch.allclose(ours, x, rtol=0, atol=3e-6)


@pytest.mark.parametrize("num_steps", [2, 3, 4, 10, 20])
@pytest.mark.parametrize(
    "grid",
    [{"flow_shift": 3.0}, {"flow_shift": 5.0}, {"use_karras_sigmas": True, "sigma_max": 200.0, "sigma_min": 0.01}],
    ids=["shift 3", "shift 5", "karras"],
)
def test_unipc_equals_diffusers(num_steps: int, grid: dict[str, Any]):
    """Up to the rounding of diffusers, which computes its weights in float32: 3.6e-6 at most over these cases."""
    scheduler, x = UniPCMultistepScheduler(**grid, **FLOW), noise(3, 5)
    ours = sample(curved_velocity, x, unipc(schedule_of(scheduler, num_steps))).latents
    assert torch.allclose(ours, by_diffusers(scheduler, num_steps, x), rtol=0, atol=5e-6)


def test_the_first_two_steps_from_pure_noise_and_the_last_one_are_first_order():
    schedule = Schedule((1.0, 0.9, 0.8, 0.3, 0.1, 0.0))
    pairs = zip(dpm2(schedule).steps, euler(schedule).steps, strict=True)
    assert [ours.index for ours, first_order in pairs if ours != first_order] == [2, 3]


def test_the_step_before_the_last_keeps_its_second_order():
    """There the log-SNR leaps by 3.76 after a step of 0.81: half of 3.76 / 0.81, times 1 - 0.0089 / 0.278."""
    assert dpm2(sd3_schedule(10)).steps[8].recall == pytest.approx(-2.234, abs=1e-3)


@pytest.mark.parametrize("build", [euler, dpm2, unipc, partial(unipc, order=1), partial(unipc, order=3)])
def test_a_single_data_point_is_hit_exactly_whatever_the_grid(build: Builder):
    point = torch.tensor([0.7, -1.3], device=CPU)
    x_0 = sample(lambda x, t: (x - point) / t.view(-1, 1), noise(4, 2), build(sd3_schedule(5))).latents
    assert torch.allclose(x_0, point.expand(4, 2), atol=1e-6)


@pytest.mark.parametrize(("build", "std_at_10", "std_at_40"), [(euler, 0.825, 0.964), (dpm2, 1.377, 1.040)])
def test_samples_of_a_gaussian_have_the_known_spread(build: Builder, std_at_10: float, std_at_40: float):
    """The velocity is linear in x: one start at 1 tells the factor on the deviation. The expected values were measured
    elsewhere on finite noise, of deviation 1.009."""
    start = torch.ones(1, 1, device=CPU)
    for num_steps, expected in [(10, std_at_10), (40, std_at_40)]:
        found = float(sample(gaussian_velocity(1.0), start, build(sd3_schedule(num_steps))).latents)
        assert found == pytest.approx(expected / 1.009, abs=1e-3)


@pytest.mark.parametrize(("build", "order"), [(euler, 1), (dpm2, 2), (partial(unipc, order=1), 2), (unipc, 3)])
def test_the_solvers_converge_at_their_order(build: Builder, order: int):
    """Along levels equidistant in log-SNR, to the exact flow of a Gaussian: x keeps its quantile in N(0, variance)."""
    std, start = 0.5, torch.ones(1, 1, device=CPU)

    def variance(sigma: float) -> float:
        return (1 - sigma) ** 2 * std**2 + sigma**2

    def relative_error(num_steps: int) -> float:
        levels = [1 / (1 + math.exp(-3 + 9 * i / num_steps)) for i in range(num_steps + 1)]
        exact = math.sqrt(variance(levels[-1]) / variance(levels[0])) * (1 - levels[-1]) * std**2 / variance(levels[-1])
        found = float(sample(gaussian_velocity(std), start, build(Schedule((*levels, 0.0)))).latents)
        return abs(found / exact - 1)

    assert math.log2(relative_error(40) / relative_error(80)) == pytest.approx(order, abs=0.2)
