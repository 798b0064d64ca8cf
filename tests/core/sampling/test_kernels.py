"""The kernels that record and score their steps: densities, and that a replay has the same bits."""

from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.sampling.flow import cps, dpm2, euler, flow_sde
from cosmos_rl_core.sampling.kernel import Kernel
from cosmos_rl_core.sampling.rollout import Trajectory, sample, table_of
from cosmos_rl_core.sampling.schedule import schedule_of
from cosmos_rl_core.sampling.solvers import kernel_of
from cosmos_rl_core.sampling.transition import Coefficients, log_prob, mean, model_input, square_error

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
