"""Schedules: the levels of diffusers' schedulers, their shift by size, and what is refused."""

import math
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_flow_match_heun_discrete import FlowMatchHeunDiscreteScheduler
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.sampling.schedule import Schedule, schedule_of
from tests.core.solvers.fields import FLOW, sd3_schedule


def test_the_grid_of_sd3_is_the_known_one():
    expected = (1, 0.9601, 0.9133, 0.8577, 0.7904, 0.7073, 0.6022, 0.4649, 0.2780, 0.0089, 0)
    schedule = sd3_schedule(10)
    assert schedule.sigmas == pytest.approx(expected, abs=5e-5)
    assert (schedule.num_steps, schedule.sigmas[0], schedule.sigmas[-1]) == (10, 1, 0)


@pytest.mark.parametrize("scheduler_class", [UniPCMultistepScheduler, DPMSolverMultistepScheduler])
def test_a_multistep_scheduler_with_flow_sigmas_gives_its_own_grid(scheduler_class: Any):
    scheduler = scheduler_class(flow_shift=8.0, **FLOW)
    schedule = schedule_of(scheduler, 10)
    scheduler.set_timesteps(10)
    assert list(schedule.sigmas) == scheduler.sigmas.double().tolist()


def test_the_karras_flow_grid_of_cosmos_is_the_known_one():
    karras: dict[str, Any] = {"use_karras_sigmas": True, "sigma_max": 200.0, "sigma_min": 0.01}
    scheduler = UniPCMultistepScheduler(**karras, **FLOW)
    sigmas = schedule_of(scheduler, 10).sigmas
    assert sigmas[:5] == pytest.approx((0.99502, 0.99084, 0.98217, 0.96313, 0.91888), abs=1e-5)
    assert sigmas[-4:] == pytest.approx((0.28448, 0.07417, 0.00990, 0), abs=1e-5)


@pytest.mark.parametrize("shift", [1.0, 1.1, 1.15, 3.0, 5.0, 6.7, 8.0, 12.0])
@pytest.mark.parametrize("num_steps", [1, 7, 50, 1000])
def test_every_static_shift_gives_a_grid_inside_the_unit_interval(shift: float, num_steps: int):
    assert schedule_of(FlowMatchEulerDiscreteScheduler(shift=shift), num_steps).num_steps == num_steps
    assert schedule_of(UniPCMultistepScheduler(flow_shift=shift, **FLOW), num_steps).num_steps == num_steps


def test_reading_the_grid_leaves_the_scheduler_as_it_was():
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=3.0)
    before = scheduler.sigmas.clone()
    schedule_of(scheduler, 4)
    assert torch.equal(scheduler.sigmas, before)


@pytest.mark.parametrize(
    ("scheduler", "said"),
    [
        (FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), "use_dynamic_shifting = true"),
        (UniPCMultistepScheduler(use_dynamic_shifting=True, **FLOW), "use_dynamic_shifting = true"),
        (DDIMScheduler(), "DDIMScheduler is not a flow scheduler"),
        (DPMSolverMultistepScheduler(), "DPMSolverMultistepScheduler is not a flow scheduler"),
        (DPMSolverMultistepScheduler(use_flow_sigmas=True), "prediction_type = 'epsilon'; a flow needs"),
        (FlowMatchHeunDiscreteScheduler(), "FlowMatchHeunDiscreteScheduler lays out"),
        (FlowMatchEulerDiscreteScheduler(invert_sigmas=True), "invert_sigmas = True, with which"),
        (UniPCMultistepScheduler(final_sigmas_type="sigma_min", **FLOW), "final_sigmas_type = 'sigma_min'"),
        (UniPCMultistepScheduler(use_exponential_sigmas=True, **FLOW), "UniPCMultistepScheduler: expected noise"),
        *((DPMSolverMultistepScheduler(**{f"use_{kind}": True}, **FLOW), f"use_{kind} = True, with which its levels do")
          for kind in ("karras_sigmas", "lu_lambdas", "exponential_sigmas")),
    ],
)  # fmt: skip
def test_a_scheduler_that_cannot_be_used_is_refused_by_name(scheduler: object, said: str):
    with pytest.raises(ConfigError, match=said):
        schedule_of(scheduler, 10)


BY_SIZE: dict[str, Any] = {"use_dynamic_shifting": True}


def test_a_static_shift_is_not_moved_by_the_size():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    assert schedule_of(scheduler, 7, shift=1.2) == schedule_of(scheduler, 7)


def test_a_shift_by_size_that_dpm_cannot_do_is_refused():
    scheduler = DPMSolverMultistepScheduler(time_shift_type="linear", **BY_SIZE, **FLOW)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="exponentially; found time_shift_type = 'linear'"):
        schedule_of(scheduler, 7, shift=1.2)


@pytest.mark.parametrize("sigmas", [(), (0.0,), (1.0, 0.5), (1.0, 1.0, 0.0), (1.2, 0.0), (1.0, math.nan, 0.0)])
def test_levels_that_are_no_grid_are_refused(sigmas: tuple[float, ...]):
    with pytest.raises(ConfigError):
        Schedule(sigmas)
