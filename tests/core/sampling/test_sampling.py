"""Schedules, deterministic kernels and the rollout loop, against diffusers and closed forms."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_flow_match_heun_discrete import FlowMatchHeunDiscreteScheduler
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler
from pydantic import ValidationError

from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.pipelines.spec import linear_shift
from cosmos_rl_core.sampling.flow import dpm2, euler, unipc
from cosmos_rl_core.sampling.kernel import Kernel
from cosmos_rl_core.sampling.rollout import sample
from cosmos_rl_core.sampling.schedule import Schedule, schedule_of
from cosmos_rl_core.sampling.solvers import kernel_of, solver_of

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


def test_the_grid_of_sd3_is_the_known_one():
    expected = (1, 0.9601, 0.9133, 0.8577, 0.7904, 0.7073, 0.6022, 0.4649, 0.2780, 0.0089, 0)
    schedule = sd3_schedule(10)
    assert schedule.sigmas == pytest.approx(expected, abs=5e-5)
    assert (schedule.num_steps, schedule.sigmas[0], schedule.sigmas[-1]) == (10, 1, 0)


@pytest.mark.parametrize("build", [euler, dpm2, unipc])
def test_a_kernel_has_one_deterministic_step_for_each_level_but_the_last(build: Builder):
    kernel = build(Schedule((1.0, 0.25, 0.0)))
    assert [(step.index, step.t, step.input_scale, step.std) for step in kernel.steps] == [
        (0, 1, 1, 0),
        (1, 0.25, 1, 0),
    ]
    assert (kernel.sigmas, kernel.trainable) == ((1.0, 0.25, 0.0), ())


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
OWN_LINE = {"base_image_seq_len": 16, "max_image_seq_len": 1024, "base_shift": 0.3, "max_shift": 1.7}


@pytest.mark.parametrize("image_tokens", [8, 300, 4096])
@pytest.mark.parametrize(
    "scheduler",
    [
        FlowMatchEulerDiscreteScheduler(**BY_SIZE),
        FlowMatchEulerDiscreteScheduler(time_shift_type="linear", shift_terminal=0.02, **OWN_LINE, **BY_SIZE),
        UniPCMultistepScheduler(**BY_SIZE, **FLOW),
        DPMSolverMultistepScheduler(**BY_SIZE, **FLOW),
    ],
)
def test_a_shift_by_size_is_the_stock_pipelines(scheduler: Any, image_tokens: int):
    # DPM++ and UniPC have no line of their own: the stock pipeline's call has a greater slope than its function
    line: dict[str, Any] = {"max_shift": 1.16}
    line |= {name.replace("image_", ""): scheduler.config[name] for name in OWN_LINE if name in scheduler.config}
    mu = calculate_shift(image_tokens, **line)
    stock = type(scheduler).from_config(scheduler.config)
    stock.set_timesteps(7, mu=mu)
    shift = linear_shift(1.16)(image_tokens, 7, scheduler.config)
    assert schedule_of(scheduler, 7, shift=shift).sigmas == tuple(stock.sigmas.tolist())
    with pytest.raises(ConfigError, match="gives it no size"):
        schedule_of(scheduler, 7)


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


EULER, DPM, UNIPC = FlowMatchEulerDiscreteScheduler, DPMSolverMultistepScheduler, UniPCMultistepScheduler
KARRAS: dict[str, Any] = {"use_karras_sigmas": True, "sigma_max": 200.0, "sigma_min": 0.01}


SOLVERS: dict[Any, dict[int, str]] = {
    EULER: {2: "euler"},
    DPM: {1: "euler", 2: "dpm2", 3: "dpm2"},
    UNIPC: {1: "unipc1", 2: "unipc", 3: "unipc3"},
}
"""The nearest solver to a scheduler of an order."""


def both_ways(scheduler_class: Any, settings: dict[str, Any], num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the solver that a plan takes for a scheduler ends, and where the scheduler does."""
    scheduler, x = scheduler_class(**settings, **({} if scheduler_class is EULER else FLOW)), noise(3, 5, 1, 1)
    config = SolverConfig(solver=SOLVERS[scheduler_class][settings.get("solver_order", 2)], num_steps=num_steps)
    ours = sample(curved_velocity, x, kernel_of(config, lambda: schedule_of(scheduler, num_steps))).latents
    return ours, by_diffusers(scheduler, num_steps, x)


def check(scheduler_class: Any, settings: dict[str, Any]) -> None:
    name = scheduler_class.__name__
    solver_of(None, name, settings)


@pytest.mark.parametrize("num_steps", [5, 16])
@pytest.mark.parametrize(
    ("scheduler_class", "settings"),
    [
        (EULER, {"use_karras_sigmas": True}),
        (EULER, {"use_exponential_sigmas": True}),
        (EULER, {"shift": 3.0, "shift_terminal": 0.02}),
        (DPM, {"euler_at_final": True}),
        (DPM, {"lower_order_final": False}),
        (DPM, {"solver_type": "bh2"}),
        (DPM, {"solver_order": 1, "flow_shift": 3.0}),
        (UNIPC, {"solver_type": "midpoint", **KARRAS}),
        (UNIPC, {"flow_shift": 3.0, "shift_terminal": 0.02}),
        *((UNIPC, {"solver_order": order, **grid}) for order in (1, 3) for grid in ({"flow_shift": 3.0}, KARRAS)),
    ],
)
def test_a_plan_takes_the_solver_that_equals_the_pipelines_own_scheduler(
    scheduler_class: Any, settings: dict[str, Any], num_steps: int
):
    check(scheduler_class, settings)
    ours, stock = both_ways(scheduler_class, settings, num_steps)
    assert torch.allclose(ours, stock, rtol=0, atol=5e-6)


@pytest.mark.parametrize(
    ("scheduler_class", "settings", "expected"),
    [
        (EULER, {"stochastic_sampling": True}, "stochastic_sampling = false"),
        (DPM, {"solver_order": 3, "flow_shift": 3.0}, "solver_order = 2"),
        (DPM, {"solver_type": "heun"}, 'solver_type = "midpoint"'),
        (DPM, {"algorithm_type": "sde-dpmsolver++"}, r'algorithm_type = "dpmsolver\+\+"'),
        (DPM, {"thresholding": True}, "thresholding = false"),
        (UNIPC, {"solver_type": "bh1"}, 'solver_type = "bh2"'),
        (UNIPC, {"thresholding": True}, "thresholding = false"),
        (UNIPC, {"lower_order_final": False}, "lower_order_final = true"),
        (UNIPC, {"disable_corrector": [1]}, r"disable_corrector = \[\]"),
    ],
)
def test_settings_by_which_the_scheduler_samples_something_else_are_refused(
    scheduler_class: Any, settings: dict[str, Any], expected: str
):
    name = scheduler_class.__name__
    with pytest.raises(ConfigError, match=f"of the pipeline's own {name}, takes its steps with {expected}; found "):
        check(scheduler_class, settings)
    ours, stock = both_ways(scheduler_class, settings, 5)
    assert not torch.allclose(ours, stock, rtol=0, atol=1e-3)


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


def test_the_velocity_sees_every_level_but_the_last_for_each_sample():
    seen = []

    def velocity(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        seen.append(t)
        return x

    sample(velocity, noise(2, 3), euler(Schedule((1.0, 0.5, 0.0))))
    assert [t.tolist() for t in seen] == [[1.0, 1.0], [0.5, 0.5]]
    assert {t.dtype for t in seen} == {torch.float32}


@pytest.mark.parametrize("build", [euler, dpm2, unipc])
def test_a_rollout_is_float32_without_gradient_and_leaves_its_noise_alone(build: Builder):
    scale = torch.nn.Parameter(torch.ones(1, device=CPU))
    start = noise(2, 3)
    before = start.clone()
    x_0 = sample(lambda x, t: (scale * x).bfloat16(), start, build(sd3_schedule(4))).latents
    assert x_0.dtype == torch.float32
    assert not x_0.requires_grad
    assert torch.equal(start, before)


@pytest.mark.parametrize(
    "options",
    [{"num_steps": 0}, {"sigma_min": 0.0}, {"s_churn": -1.0}, {"s_noise": math.nan}, {"solver_option": "2mid"}],
)
def test_settings_of_the_edm_sampler_have_bounds(options: dict[str, Any]):
    with pytest.raises(ValidationError, match=next(iter(options))):
        SolverConfig(solver="edm", **options)
