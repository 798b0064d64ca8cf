"""The rollout loop: what it asks of the model, what it records, and what it leaves alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.sampling.flow import dpm2, euler, unipc
from cosmos_rl_core.sampling.rollout import sample
from cosmos_rl_core.sampling.schedule import Schedule
from cosmos_rl_core.sampling.solvers import kernel_of
from cosmos_rl_core.sampling.transition import log_prob, square_error
from tests.core.sampling.test_kernels import CPU, KERNELS, SD3, draw, replay, rollout, rows, start, velocity
from tests.core.solvers.fields import Builder, noise, sd3_schedule


@pytest.mark.parametrize("solver", ["euler", "dpm2", "unipc", "unipc1", "unipc3", "flow_sde", "cps", "edm"])
def test_the_levels_of_a_kernel_are_the_times_at_which_a_rollout_asks_the_model(solver: Any):
    kernel = kernel_of(SolverConfig(solver=solver, num_steps=10), lambda: SD3)
    asked: list[float] = []

    def ask(x: Tensor, t: Tensor) -> Tensor:
        asked.append(float(t[0]))
        return velocity(x, t)

    sample(ask, start(), kernel, draw=draw)
    assert [*kernel.levels] == pytest.approx([*asked, 0.0], rel=1e-6)
    assert (kernel.levels == SD3.sigmas) is (solver != "edm")


def test_a_masked_rollout_counts_the_likelihood_of_generated_dimensions_alone():
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
