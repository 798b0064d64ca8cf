"""Rejection fine-tuning against its closed forms: the samples of a prompt that train, the loss and its gradient."""

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from cosmos_rl_core.algorithms._base import Batch
from cosmos_rl_core.algorithms.rft import Algorithm, Options
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.errors import ArtifactError

CPU = torch.device("cpu")


def rft(**options: Any) -> Algorithm:
    return Algorithm(Options.model_validate({"type": "rft", "dataset": DatasetOptions(name="some prompts"), **options}))


def samples(rewards: list[float], prompts: str, **columns: Any) -> pd.DataFrame:
    ids = [f"s{i}" for i in range(len(rewards))]
    table = pd.DataFrame({"sample_id": ids, "prompt_id": list(prompts), "reward": rewards, "valid": True})
    return table.assign(**columns)


def used(table: pd.DataFrame, **options: Any) -> str:
    found = rft(**options).advantages(table)
    assert np.array_equal(found["advantage"].notna(), found["used"])
    assert set(found.loc[found["used"], "advantage"]) <= {1.0}
    return "".join("x" if one else "." for one in found["used"])


@pytest.mark.parametrize(
    ("keep", "expected"),
    # Of five, a quarter is two; equal rewards say nothing, unless all train.
    [(0.25, "...x...xx..."), (0.5, "..xx..xxx..."), (0.26, "..xx...xx..."), (1.0, "xxxxxxxxxxxx")],
)
def test_the_highest_rewards_of_each_prompt_train(keep: float, expected: str) -> None:
    rewards = [0.0, 1.0, 2.0, 3.0, 5.0, 6.0, 7.0, 8.0, 9.0, 4.0, 4.0, 4.0]
    assert used(samples(rewards, "ppppqqqqqrrr"), keep=keep) == expected


def test_samples_without_a_score_and_small_groups_do_not_train() -> None:
    table = samples([1.0, 2.0, 9.0, 5.0], "pppq", valid=[True, True, False, True])
    assert used(table, keep=0.5) == ".x.."
    assert used(table, keep=1.0) == "xx.."


def test_among_equal_rewards_samples_that_gates_hold_back_come_last() -> None:
    table = samples([1.0, 1.0, 0.0, 1.0], "pppp", held=[True, False, False, False])
    assert used(table, keep=0.5) == ".x.x"


def test_a_valid_sample_without_a_finite_reward_is_refused() -> None:
    with pytest.raises(ArtifactError, match="without a finite reward"):
        rft().advantages(samples([1.0, math.inf], "pp"))


@pytest.mark.parametrize("kl_beta", [0.0, 0.3])
def test_loss_and_gradient_match_a_linear_models(kl_beta: float) -> None:
    generator = torch.Generator(device=CPU).manual_seed(0)
    x_0, noise = (torch.randn(3, 4, generator=generator, device=CPU, dtype=torch.float64) for _ in range(2))
    t = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64, device=CPU)
    weights, base = (torch.randn(4, 4, generator=generator, device=CPU, dtype=torch.float64) for _ in range(2))
    weights.requires_grad_()
    mask = torch.tensor([[1.0, 1.0, 0.0, 1.0]], device=CPU)
    batch = Batch(x_0, noise, t, torch.ones(3, device=CPU), mask)
    parts = {"current": batch.x_t @ weights.T, "reference": batch.x_t @ base.T}
    loss = rft(kl_beta=kl_beta).loss(parts.__getitem__, batch)
    loss.per_sample.sum().backward()
    shown = torch.tensor([True, True, False, True], device=CPU)
    wrong, apart = (parts["current"] - (noise - x_0))[:, shown], (parts["current"] - parts["reference"])[:, shown]
    expected = wrong.square().mean(1) + kl_beta * apart.square().mean(1)
    assert torch.allclose(loss.per_sample, expected)
    slope = torch.zeros(3, 4, device=CPU, dtype=torch.float64)
    slope[:, shown] = 2 / 3 * (wrong + kl_beta * apart).detach()
    assert weights.grad is not None
    assert torch.allclose(weights.grad, slope.T @ batch.x_t)
    assert ("kl" in loss.metrics) == (kl_beta > 0)
