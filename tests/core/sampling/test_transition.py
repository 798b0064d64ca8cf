"""One step of a kernel: its density, its gradient, and what is stored of it."""

import math

import pytest
import torch

from cosmos_rl_core.sampling.flow import flow_sde
from cosmos_rl_core.sampling.kernel import Kernel
from cosmos_rl_core.sampling.transition import log_prob, mean, square_error
from tests.core.sampling.test_kernels import (
    CPU,
    KERNELS,
    LEVEL,
    SD3,
    SHAPE,
    draw,
    every_stochastic_kernel,
    replay,
    rollout,
    rows,
    start,
)


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


def test_the_stored_states_are_the_scored_ones():
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


def test_a_step_without_its_deviation_has_no_density():
    kernel = KERNELS["2ab"]
    assert [step in kernel.trainable for step in (8, 9)] == [True, False]
    assert log_prob(torch.ones(2, device=CPU), rows(kernel, 8, 9).std).isfinite().tolist() == [True, False]
