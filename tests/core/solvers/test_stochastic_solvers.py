"""Solvers with noise, against literal loops, closed forms and known numbers."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.sampling.flow import cps, euler, flow_sde
from cosmos_rl_core.sampling.kernel import Kernel
from cosmos_rl_core.sampling.rollout import sample
from cosmos_rl_core.sampling.schedule import Schedule, schedule_of
from cosmos_rl_core.sampling.transition import clean, mean, model_input
from tests.core.sampling.test_kernels import CPU, KERNELS, LEVEL, SD3, draw, edm, rollout, rows, start, velocity


def close(found: Tensor, expected: Tensor, relative: float) -> bool:
    return bool((found - expected).abs().max() <= relative * expected.abs().max())


def test_the_grid_and_the_deviations_of_edm_are_the_known_ones():
    kernel = edm(10)
    grid = (200, 115.26925, 63.37756, 32.95090, 16.01377, 7.16250, 2.88530, 1.01452, 0.29679, 0.06676, 0.01)
    stds = (50.2556, 27.6316, 14.3661, 6.98176, 3.12274, 1.25795, 0.442318, 0.129397, 0.029106)
    assert kernel.sigmas == pytest.approx(grid, rel=1e-5, abs=5e-6)
    exact = [(200 ** (1 / 7) + i / 10 * (0.01 ** (1 / 7) - 200 ** (1 / 7))) ** 7 for i in range(11)]
    assert kernel.sigmas == pytest.approx(exact, rel=1e-12)
    assert [step.std for step in kernel.steps[:9]] == pytest.approx(stds, rel=2e-5)
    assert [step.std for step in kernel.steps[9:]] == [0, 0]
    assert kernel.trainable == tuple(range(9))
    assert kernel.steps[0].t / (1 - kernel.steps[0].t) == pytest.approx(218.18182)
    assert kernel.start_std == 200
    assert kernel.start_churn_std == pytest.approx(math.sqrt(218.181818181818**2 - 200**2))


def test_churn_acts_strictly_inside_its_window_and_is_capped():
    sigmas = edm(10).sigmas
    kernel = edm(10, s_t_min=sigmas[6], s_t_max=200.0)
    assert kernel.start_churn_std == 0
    assert kernel.trainable == (0, 1, 2, 3, 4)
    assert [step.t / (1 - step.t) for step in kernel.steps[6:]] == pytest.approx(sigmas[6:])
    assert edm(10, s_churn=100).steps[0].std == pytest.approx(math.sqrt(0.2) * sigmas[1])


def test_the_deviations_of_the_flow_sde_are_the_known_ones():
    known = (0.7000, 0.7430, 0.5362, 0.4459, 0.3918, 0.3528, 0.3191, 0.2820, 0.2254, 0.0063)
    assert [step.std for step in flow_sde(SD3, LEVEL).steps] == pytest.approx(known, abs=5e-5)


@pytest.mark.parametrize("first", [1.0, 1 - 6e-8, 1 - 1.02e-6], ids=["exact", "rounded", "as UniPC puts it"])
def test_at_pure_noise_the_flow_sde_takes_its_diffusion_from_the_second_level(first: float):
    step = flow_sde(Schedule((first, *SD3.sigmas[1:])), LEVEL).steps[0]
    assert step.diffusion == pytest.approx(3.50567, abs=1e-5)


def edm_loop(order: int, num_steps: int, s_noise: float, s_t_min: float, s_t_max: float) -> tuple[Tensor, Tensor]:
    """Churn, denoise, step, in float64 and in that order, with phi functions: the last state and its x_0."""
    grid = [(200 ** (1 / 7) + i / num_steps * (0.01 ** (1 / 7) - 200 ** (1 / 7))) ** 7 for i in range(num_steps + 1)]
    eta = min(1 / (num_steps + 1), math.sqrt(1.2) - 1)

    def denoised(x: Tensor, sigma: float) -> Tensor:
        t = sigma / (1 + sigma)
        return (1 - t) * x - t * velocity((1 - t) * x, torch.full((5,), t, dtype=torch.float64, device=CPU))

    x, previous = grid[0] * start().double(), None
    for i, (sigma, target) in enumerate(pairwise(grid)):
        lifted = sigma
        if s_t_min < sigma < s_t_max:
            lifted = (1 + eta) * sigma
            x = x + s_noise * math.sqrt(lifted**2 - sigma**2) * draw(i - 1).double()
        x_0 = denoised(x, lifted)
        h = math.log(lifted / target)
        if order == 1 or previous is None:
            x_next = target / lifted * x + (1 - target / lifted) * x_0
        else:
            last_x_0, last_sigma = previous
            phi_1 = (1 - math.exp(-h)) / h
            phi_2 = (1 - phi_1) / h
            b_2 = phi_2 / (math.log(lifted / last_sigma) / h)
            x_next = math.exp(-h) * x + h * ((phi_1 - b_2) * x_0 + b_2 * last_x_0)
        x, previous = x_next, (x_0, lifted)
    return x, denoised(x, grid[-1])


@pytest.mark.parametrize(("option", "order"), [("2ab", 2), ("1euler", 1)])
@pytest.mark.parametrize("num_steps", [1, 2, 10, 35])
@pytest.mark.parametrize(("s_noise", "s_t_min", "s_t_max"), [(1.0, 0.0, math.inf), (1.003, 0.05, 50.0)])
def test_edm_equals_its_literal_loop(
    option: str, order: int, num_steps: int, s_noise: float, s_t_min: float, s_t_max: float
):
    churn = {"s_noise": s_noise, "s_t_min": s_t_min, "s_t_max": s_t_max}
    kernel = edm(num_steps, solver_option=option, **churn)
    trajectory = rollout(kernel)
    x, x_0 = edm_loop(order, num_steps, **churn)
    assert close(in_float64(kernel)[-2], x, 1e-10)
    assert close(in_float64(kernel)[-1], x_0, 1e-10)
    assert close(trajectory.states[num_steps], x, 1e-5)
    assert close(trajectory.latents, x_0, 1e-5)


def in_float64(kernel: Kernel) -> list[Tensor]:
    """The states of the table's own recursion, never rounded."""
    x = kernel.start_std * start().double() + kernel.start_churn_std * draw(-1).double()
    states, x_0 = [x], torch.zeros_like(x)
    for step in kernel.steps:
        at = rows(kernel, *[step.index] * 5)
        v = velocity(step.input_scale * x, at.t)
        x, x_0 = mean(x, v, x_0, at) + step.std * draw(step.index).double(), clean(x, v, at)
        states.append(x)
    return states


def literal_flow_sde(x: Tensor, v: Tensor, i: int) -> tuple[Tensor, float]:
    sigma, following = SD3.sigmas[i : i + 2]
    dt = following - sigma
    diffusion = LEVEL * math.sqrt(sigma / (1 - (SD3.sigmas[1] if sigma == 1 else sigma)))
    drift = v + diffusion**2 / (2 * sigma) * (x + (1 - sigma) * v)
    return x + drift * dt, diffusion * math.sqrt(-dt)


def literal_cps(x: Tensor, v: Tensor, i: int) -> tuple[Tensor, float]:
    sigma, following = SD3.sigmas[i : i + 2]
    x_0, noise = x - sigma * v, x + (1 - sigma) * v
    std = following * math.sin(LEVEL * math.pi / 2)
    return (1 - following) * x_0 + math.sqrt(following**2 - std**2) * noise, std


@pytest.mark.parametrize(("name", "literal"), [("flow_sde", literal_flow_sde), ("cps", literal_cps)])
def test_the_stochastic_flow_kernels_equal_their_literal_formulas(name: str, literal: Callable[..., Any]):
    x = start().double()
    for i, sigma in enumerate(SD3.sigmas[:-1]):
        center, std = literal(x, velocity(x, torch.full((5,), sigma, dtype=torch.float64, device=CPU)), i)
        x = center + std * draw(i).double()
        assert KERNELS[name].steps[i].std == pytest.approx(std, rel=1e-14)
        assert close(in_float64(KERNELS[name])[i + 1], x, 1e-12)
    assert close(rollout(KERNELS[name]).latents, x, 1e-5)


@pytest.mark.parametrize("option", ["2ab", "1euler"])
def test_without_churn_a_constant_estimate_of_x_0_is_met_on_a_straight_line(option: str):
    kernel, c = edm(10, s_churn=0, solver_option=option), 0.37
    assert kernel.trainable == ()

    def to_c(x: Tensor, t: Tensor) -> Tensor:
        return (x - c) / t.view(-1, 1, 1, 1)

    trajectory = sample(to_c, start(), kernel, record=[0, 10])
    expected = c + 0.01 / 200 * (trajectory.states[0] - c)
    assert torch.allclose(trajectory.states[10], expected, rtol=0, atol=1e-6)
    assert torch.allclose(trajectory.latents, torch.full_like(trajectory.latents, c), rtol=0, atol=1e-6)


def test_the_last_step_of_edm_is_its_estimate_of_x_0():
    kernel, trajectory = edm(10), rollout(edm(10))
    x, at = trajectory.states[10], rows(kernel, *[10] * 5)
    assert torch.equal(trajectory.latents, clean(x, velocity(*model_input(x, at)), at).float())


@pytest.mark.parametrize("build", [flow_sde, cps])
def test_as_the_noise_goes_the_stochastic_flow_kernels_become_euler(build: Callable[[Schedule, float], Kernel]):
    for ours, limit in zip(build(SD3, 1e-6).steps, euler(SD3).steps, strict=True):
        assert (ours.keep, ours.push) == pytest.approx((limit.keep, limit.push), abs=1e-9)
        assert ours.std < 1e-5


def test_the_flow_sde_preserves_the_marginals_of_the_flow():
    """For normal data of deviation 0.5 the velocity is linear in x, so the variance follows from the table alone."""

    def final_std(num_steps: int) -> float:
        variance = 1.0
        for step in flow_sde(schedule_of(FlowMatchEulerDiscreteScheduler(shift=3.0), num_steps), LEVEL).steps:
            slope = (step.t - (1 - step.t) * 0.25) / ((1 - step.t) ** 2 * 0.25 + step.t**2)
            variance = (step.keep + step.push * slope) ** 2 * variance + step.std**2
        return math.sqrt(variance)

    assert final_std(1000) == pytest.approx(0.5, abs=4e-3)
    assert abs(final_std(1000) - 0.5) < abs(final_std(100) - 0.5) / 3


def test_cps_preserves_the_weights_of_a_known_x_0_and_its_noise():
    for step, following in zip(cps(SD3, LEVEL).steps, SD3.sigmas[1:], strict=True):
        weight_of_x_0 = step.keep * (1 - step.t) - step.push
        weight_of_noise = step.keep * step.t + step.push
        assert weight_of_x_0 == pytest.approx(1 - following)
        assert math.hypot(weight_of_noise, step.std) == pytest.approx(following)


def test_an_edm_whose_sigmas_do_not_fall_is_refused():
    with pytest.raises(ConfigError, match=r"expected sigma_min < sigma_max, found 0\.01 and 0\.01"):
        edm(10, sigma_max=0.01)
    with pytest.raises(ConfigError, match="lower s_churn or fewer steps"):
        edm(1000, s_churn=50.0, s_t_max=100.0)


@pytest.mark.parametrize(
    ("build", "noise_level"), [(b, a) for b in (flow_sde, cps) for a in (0.0, -0.1, math.nan, math.inf)] + [(cps, 1.1)]
)
def test_an_impossible_noise_level_is_refused(build: Callable[[Schedule, float], Kernel], noise_level: float):
    with pytest.raises(ConfigError, match="noise_level"):
        build(SD3, noise_level)
