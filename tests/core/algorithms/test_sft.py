"""Supervised fine-tuning: the loss against closed forms, and its noise levels."""

from typing import Any

import pandas as pd
import pytest
import torch
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from cosmos_rl_core.algorithms._base import Batch
from cosmos_rl_core.algorithms.sft import Algorithm, Options
from cosmos_rl_core.config.policy import DiffusersConfig
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.sampling.schedule import schedule_of
from cosmos_rl_core.training.noise_levels import DrawKey, sft_time
from cosmos_rl_core.training.optimizer import loss_share

CPU = torch.device("cpu")
SFT = Algorithm(Options.model_validate({"type": "sft", "dataset": DatasetOptions(name="some media")}))
SD3_GRID = schedule_of(FlowMatchEulerDiscreteScheduler(shift=3.0), 1000).sigmas


def batch_of(size: int) -> Batch:
    generator = torch.Generator(device=CPU).manual_seed(0)
    x_0, noise = (torch.randn(size, 4, 3, generator=generator, device=CPU) for _ in range(2))
    return Batch(x_0, noise, torch.rand(size, generator=generator, device=CPU), None)


def density(**fields: Any) -> DiffusersConfig:
    return DiffusersConfig.model_validate(fields)


def times(count: int = 2000, **fields: Any) -> torch.Tensor:
    drawn = [sft_time(SD3_GRID, density(**fields), DrawKey(0, 0, 0, f"item-{i}")) for i in range(count)]
    return torch.tensor(drawn, dtype=torch.float64, device=CPU)


def test_the_perfect_velocity_has_no_loss():
    batch = batch_of(3)
    assert SFT.loss(lambda part: batch.noise - batch.x_0, batch).per_sample.tolist() == [0, 0, 0]


def test_the_velocity_0_has_the_mean_square_of_the_target_as_its_loss():
    batch = batch_of(3)
    expected = [float(((e - x) ** 2).mean()) for e, x in zip(batch.noise, batch.x_0, strict=True)]
    loss = SFT.loss(lambda part: torch.zeros_like(batch.x_0, device=CPU), batch)
    assert loss.per_sample.tolist() == pytest.approx(expected)
    assert loss.metrics["velocity_error"].tolist() == pytest.approx(expected)
    assert not loss.metrics["velocity_error"].requires_grad


def test_only_the_current_policy_is_evaluated_and_gets_the_gradient_of_a_mean_square():
    batch, asked = batch_of(2), []
    velocity = torch.zeros_like(batch.x_0, device=CPU).requires_grad_()
    SFT.loss(lambda part: asked.append(part) or velocity, batch).per_sample.sum().backward()
    assert asked == list(SFT.needs.roles) == ["current"]
    assert velocity.grad is not None
    assert torch.allclose(velocity.grad, -2 * (batch.noise - batch.x_0) / 12)


@pytest.mark.parametrize("mini_batch", [1, 2, 5])
def test_accumulated_micro_batches_have_the_gradient_of_one_big_batch(mini_batch: int):
    def gradient(size: int) -> torch.Tensor:
        weight = torch.eye(3, device=CPU).requires_grad_()
        whole = batch_of(8)
        for start in range(0, 8, size):
            cut = slice(start, start + size)
            part = Batch(whole.x_0[cut], whole.noise[cut], whole.t[cut], None)
            loss_share(SFT.loss(lambda _, part=part: part.x_t @ weight, part).per_sample, 8, 1).backward()
        assert weight.grad is not None
        return weight.grad

    assert torch.allclose(gradient(mini_batch), gradient(8), rtol=1e-5, atol=1e-7)


def test_the_fine_grid_of_sd3_has_the_known_levels():
    rising = SD3_GRID[-2::-1]
    assert [rising[0], rising[500], rising[999]] == pytest.approx([0.0089286, 0.751494, 1], abs=1e-6)


@pytest.mark.parametrize("scheme", ["logit_normal", "uniform"])
def test_the_median_noise_level_of_sd3_is_three_quarters(scheme: str):
    drawn = times(weighting_scheme=scheme)
    assert float(drawn.median()) == pytest.approx(0.75, abs=0.02)


def test_the_noise_levels_follow_their_density():
    """The place u in the grid from its level 3 u / (1 + 2 u): deviation .289 if uniform, .208 if logit-normal."""
    for scheme, deviation in (("uniform", 0.2887), ("logit_normal", 0.2083)):
        drawn = times(weighting_scheme=scheme)
        places = drawn / (3 - 2 * drawn)
        assert float(places.mean()) == pytest.approx(0.5, abs=0.015)
        assert float(places.std()) == pytest.approx(deviation, abs=0.01)


def test_a_higher_logit_mean_trains_noisier_levels():
    assert float(times(300, logit_mean=2.0).mean()) > float(times(300).mean()) + 0.1


@pytest.mark.parametrize(("logit_mean", "end"), [(-1e4, -2), (1e4, 0)])
def test_the_extreme_levels_are_the_ends_of_the_grid_and_never_0(logit_mean: float, end: int):
    assert sft_time(SD3_GRID, density(logit_mean=logit_mean), DrawKey(0, 0, 0, "a")) == SD3_GRID[end]


def test_a_level_depends_on_its_key_alone():
    config, key = density(), DrawKey(1, 2, 3, "item")
    others = [DrawKey(2, 2, 3, "item"), DrawKey(1, 3, 3, "item"), DrawKey(1, 2, 4, "item"), DrawKey(1, 2, 3, "other")]
    assert sft_time(SD3_GRID, config, key) == sft_time(SD3_GRID, config, key)
    assert sft_time(SD3_GRID, config, key) not in [sft_time(SD3_GRID, config, other) for other in others]


@pytest.mark.parametrize("shift", [3.0, 8.0])
def test_the_fine_grid_of_a_multistep_flow_scheduler_has_no_repeated_level(shift: float):
    scheduler = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
    assert len(set(schedule_of(scheduler, 1000).sigmas)) == 1001


def test_there_are_no_advantages_without_rewards():
    with pytest.raises(ConfigError, match="sft trains on a dataset's media"):
        SFT.advantages(pd.DataFrame())


def test_sft_trains_the_current_policy_on_one_level_a_sample_and_keeps_no_old_copy():
    assert (SFT.needs.behaviour, Options.rewarded) == ("current", False)
    assert SFT.needs.old_decay is None
