"""The kernels that record and score their steps, against literal loops, closed forms and known numbers."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.sampling.flow import cps, dpm2, euler, flow_sde
from cosmos_rl_core.sampling.kernel import Kernel
from cosmos_rl_core.sampling.rollout import Trajectory, sample, table_of
from cosmos_rl_core.sampling.schedule import Schedule, schedule_of
from cosmos_rl_core.sampling.solvers import kernel_of
from cosmos_rl_core.sampling.transition import Coefficients, clean, log_prob, mean, model_input, square_error

CPU = torch.device("cpu")


def edm(num_steps: int, **options: Any) -> Kernel:
    return kernel_of(SolverConfig(solver="edm", num_steps=num_steps, **options), lambda: SD3)


SD3 = schedule_of(FlowMatchEulerDiscreteScheduler(shift=3.0), 10)
LEVEL = 0.7
KERNELS = {
    "euler": euler(SD3),
    "dpm2": dpm2(SD3),
    "flow_sde": flow_sde(SD3, LEVEL),
    "cps": cps(SD3, LEVEL),
    "2ab": edm(10),
    "1euler": edm(10, solver_option="1euler"),
    "2ab without churn": edm(10, s_churn=0),
    "2ab in a window": edm(10, s_t_min=1, s_t_max=100, s_noise=1.003),
}
STOCHASTIC = {name: kernel for name, kernel in KERNELS.items() if kernel.trainable}
SHAPE = (2, 3, 4)
every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
every_stochastic_kernel = pytest.mark.parametrize("kernel", STOCHASTIC.values(), ids=STOCHASTIC)


def draw(index: int, batch: int = 5, device: torch.device = CPU) -> Tensor:
    """The noise of one step, to each sample its own."""
    generators = [torch.Generator(device=CPU).manual_seed(1000 * sample + index + 1) for sample in range(batch)]
    return torch.stack([torch.randn(SHAPE, generator=generator, device=CPU) for generator in generators]).to(device)


def start(batch: int = 5, device: torch.device = CPU) -> Tensor:
    return draw(998, batch, device)


def velocity(x: Tensor, t: Tensor) -> Tensor:
    """A curved field, elementwise, in the type of its arguments."""
    level = t.view(-1, *(1,) * (x.ndim - 1))
    return (2 * x).sin() * (1 - level / 2) + level * x - 0.3


def rollout(kernel: Kernel, batch: int = 5, device: torch.device = CPU, **options: Any) -> Trajectory:
    options = {"draw": lambda i: draw(i, batch, device), "record": range(len(kernel.steps))} | options
    return sample(velocity, start(batch, device), kernel, **options)


def rows(kernel: Kernel, *indices: int, device: torch.device = CPU) -> Coefficients:
    return table_of(kernel, device).at(torch.tensor(indices, device=device))


def replay(trajectory: Trajectory, kernel: Kernel, samples: list[int], indices: list[int]) -> tuple[Tensor, Tensor]:
    """States after, and means of, one step of its own for each sample."""
    x, x_next = (
        torch.stack([trajectory.states[i + k][b] for b, i in zip(samples, indices, strict=True)]) for k in (0, 1)
    )
    none, at = torch.zeros_like(trajectory.latents), rows(kernel, *indices, device=trajectory.latents.device)
    history = torch.stack([trajectory.history.get(i, none)[b] for b, i in zip(samples, indices, strict=True)])
    return x_next, mean(x, velocity(*model_input(x, at)), history, at)


def close(found: Tensor, expected: Tensor, relative: float) -> bool:
    return bool((found - expected).abs().max() <= relative * expected.abs().max())


@pytest.mark.parametrize("solver", ["euler", "dpm2", "unipc", "unipc1", "unipc3", "flow_sde", "cps", "edm"])
def test_the_levels_are_those_at_which_a_rollout_asks_the_model(solver: Any):
    kernel = kernel_of(SolverConfig(solver=solver, num_steps=10), lambda: SD3)
    asked: list[float] = []

    def ask(x: Tensor, t: Tensor) -> Tensor:
        asked.append(float(t[0]))
        return velocity(x, t)

    sample(ask, start(), kernel, draw=draw)
    assert [*kernel.levels] == pytest.approx([*asked, 0.0], rel=1e-6)
    assert (kernel.levels == SD3.sigmas) is (solver != "edm")


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


@every_stochastic_kernel
def test_a_log_prob_is_the_normal_distributions_and_equal_on_replay(kernel: Kernel, device: torch.device):
    trajectory = rollout(kernel, device=device)
    assert set(trajectory.log_prob) == set(kernel.trainable)
    for i in kernel.trainable:
        x_next, center = replay(trajectory, kernel, list(range(5)), [i] * 5)
        assert torch.equal(
            log_prob(square_error(x_next, center), rows(kernel, i, device=device).std), trajectory.log_prob[i]
        )
        expected = torch.distributions.Normal(center, kernel.steps[i].std).log_prob(x_next.double())
        assert torch.allclose(trajectory.log_prob[i], expected.flatten(1).mean(1), rtol=1e-13, atol=1e-13)


@every_kernel
def test_a_replay_repeats_every_step_bit_for_bit(kernel: Kernel, device: torch.device):
    """Also with a step of its own for each sample, and with one sample at a time."""
    trajectory, count = rollout(kernel, device=device), len(kernel.steps)
    order = [(b, (3 * b + i) % count) for i in range(count) for b in range(5)]
    batches = [order[k : k + 5] for k in range(0, len(order), 5)] + [[pair] for pair in order]
    for batch in batches:
        samples, indices = [b for b, _ in batch], [i for _, i in batch]
        x_next, center = replay(trajectory, kernel, samples, indices)
        for k, (b, i) in enumerate(batch):
            again = (center[k] + kernel.steps[i].std * draw(i, device=device)[b].double()).float()
            assert torch.equal(x_next[k], again)


@every_kernel
def test_a_sample_does_not_depend_on_its_batch(kernel: Kernel, device: torch.device):
    alone, together = rollout(kernel, 1, device), rollout(kernel, 5, device)
    assert torch.equal(alone.latents[0], together.latents[0])
    for i, log_probs in alone.log_prob.items():
        assert torch.equal(alone.states[i][0], together.states[i][0])
        assert float(log_probs[0]) == pytest.approx(float(together.log_prob[i][0]), rel=1e-14)


@every_stochastic_kernel
def test_the_residual_of_a_transition_is_its_draw_and_the_deterministic_steps_have_none(kernel: Kernel):
    trajectory = rollout(kernel)
    for step in kernel.steps:
        x_next, center = replay(trajectory, kernel, list(range(5)), [step.index] * 5)
        if step.std > 0:
            rounding = 2**-23 * float(x_next.abs().max()) / step.std
            assert torch.allclose((x_next - center) / step.std, draw(step.index).double(), rtol=0, atol=rounding)
        else:
            assert torch.equal(x_next, center.float())


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


def test_the_gradient_of_a_log_prob_is_the_closed_form():
    kernel, i = flow_sde(SD3, LEVEL), 4
    sigma, dt, diffusion = SD3.sigmas[i], SD3.sigmas[i + 1] - SD3.sigmas[i], kernel.steps[i].diffusion
    at = rows(kernel, *[i] * 5)
    x, x_next, v = start(), draw(0), draw(1).requires_grad_()
    center = mean(x, v, None, at)
    log_prob(square_error(x_next, center), at.std).sum().backward()
    count = math.prod(SHAPE)
    to_mean = (1 + diffusion**2 * (1 - sigma) / (2 * sigma)) * dt
    expected = (x_next - center) / (diffusion**2 * -dt * count) * to_mean
    assert v.grad is not None
    assert torch.allclose(v.grad.double(), expected, rtol=1e-6, atol=1e-9)


def test_what_is_stored_is_what_was_scored():
    """Storing states rounds nothing in float32; in bfloat16 the last, sharp step would be off by much more than a clip
    range of 1e-4."""
    kernel, trajectory = flow_sde(SD3, LEVEL), rollout(flow_sde(SD3, LEVEL))
    assert {x.dtype for x in trajectory.states.values()} == {torch.float32}
    x_next, center = replay(trajectory, kernel, list(range(5)), [9] * 5)
    off = log_prob(square_error(x_next.bfloat16(), center), rows(kernel, *[9] * 5).std) - trajectory.log_prob[9]
    assert off.abs().max() > 1e-3


def test_a_given_dimension_counts_neither_above_nor_below_the_fraction_line():
    mask = torch.tensor([[0.0, 1.0, 1.0]], device=CPU)
    x_next, center = (
        torch.tensor([[9.0, 1.0, 2.0], [9.0, 0.0, 4.0]], device=CPU),
        torch.zeros(2, 3, device=CPU).double(),
    )
    assert square_error(x_next, center, mask).tolist() == [2.5, 8.0]
    assert square_error(x_next, center).tolist() == pytest.approx([86 / 3, 97 / 3])


def test_a_masked_rollout_scores_what_was_generated():
    mask = torch.ones(1, 2, 1, 1, device=CPU)
    mask[:, 0] = 0
    masked, whole = rollout(KERNELS["2ab"], mask=mask), rollout(KERNELS["2ab"])
    x_next, center = replay(whole, KERNELS["2ab"], list(range(5)), [3] * 5)
    expected = log_prob(square_error(x_next[:, 1:], center[:, 1:]), rows(KERNELS["2ab"], 3).std)
    assert torch.equal(masked.latents, whole.latents)
    assert torch.allclose(masked.log_prob[3], expected, rtol=1e-14)


def test_only_the_recorded_steps_are_kept():
    trajectory = rollout(KERNELS["2ab"], record={0, 4, 5})
    assert sorted(trajectory.states) == [0, 1, 4, 5, 6]
    assert sorted(trajectory.history) == [4, 5]
    assert sorted(trajectory.log_prob) == [0, 4, 5]
    assert trajectory.log_prob[4].shape == (5,)


def test_a_stochastic_kernel_needs_its_noise():
    for name in ("flow_sde", "2ab"):
        with pytest.raises(ValueError, match="needs draw"):
            sample(velocity, start(), KERNELS[name])


def test_a_step_without_its_deviation_has_no_density():
    kernel = KERNELS["2ab"]
    assert [step in kernel.trainable for step in (8, 9)] == [True, False]
    assert log_prob(torch.ones(2, device=CPU), rows(kernel, 8, 9).std).isfinite().tolist() == [True, False]


def test_an_edm_whose_sigmas_do_not_fall_is_refused():
    with pytest.raises(ConfigError, match=r"expected sigma_min < sigma_max, found 0\.01 and 0\.01"):
        edm(10, sigma_max=0.01)
    with pytest.raises(ConfigError, match="lower s_churn or fewer steps"):
        edm(1000, s_churn=50.0, s_t_max=100.0)


@pytest.mark.parametrize(
    ("build", "noise_level"), [(b, a) for b in (flow_sde, cps) for a in (0.0, -0.1, math.nan, math.inf)] + [(cps, 1.1)]
)
def test_a_noise_level_that_cannot_be_is_refused(build: Callable[[Schedule, float], Kernel], noise_level: float):
    with pytest.raises(ConfigError, match="noise_level"):
        build(SD3, noise_level)
