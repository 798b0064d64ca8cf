"""DiffusionNFT against its closed forms: advantages, the probability of being good, the loss and its gradient."""

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from cosmos_rl_core.algorithms._base import Batch, Loss
from cosmos_rl_core.algorithms.nft import Algorithm, Options
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.errors import ArtifactError, ConfigError

CPU = torch.device("cpu")
DATASET = DatasetOptions(name="some prompts")


def nft(**options: Any) -> Algorithm:
    return Algorithm(Options.model_validate({"type": "nft", "dataset": DATASET, "kl_beta": 0.0, **options}))


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator(device=CPU).manual_seed(seed), device=CPU, dtype=dtype)


def batch_of(advantages: list[float] | None, *, x_0: torch.Tensor | None = None, t: list[float] | None = None) -> Batch:
    size = len(advantages or [0.0])
    x_0 = normal(0, size, 2, 3, 3) if x_0 is None else x_0
    levels = torch.tensor(t or [0.2 + 0.6 * i / size for i in range(size)], dtype=x_0.dtype, device=CPU)
    given = None if advantages is None else torch.tensor(advantages, dtype=x_0.dtype, device=CPU)
    return Batch(x_0=x_0, noise=normal(1, *x_0.shape, dtype=x_0.dtype), t=levels, advantages=given)


def loss_of(algorithm: Algorithm, batch: Batch, current: torch.Tensor, **parts: torch.Tensor) -> Loss:
    return algorithm.loss(lambda part: {"current": current, **parts}[part], batch)


def gradient_at_old(algorithm: Algorithm, batch: Batch, old: torch.Tensor) -> tuple[Loss, torch.Tensor]:
    """Loss, and its gradient at the current velocity, where current and old are the same."""
    current = old.clone().requires_grad_()
    loss = loss_of(algorithm, batch, current, behaviour=old)
    (gradient,) = torch.autograd.grad(loss.per_sample.sum(), current)
    return loss, gradient


# ---- the probability of being good


def test_advantages_map_to_the_known_probabilities():
    advantages = [-5.0, 0.0, 5.0, 10.0, 2.0, -7.0]
    loss, _ = gradient_at_old(nft(), batch_of(advantages), normal(2, 6, 2, 3, 3))
    assert loss.metrics["optimality"].tolist() == pytest.approx([0, 0.5, 1, 1, 0.7, 0])


def test_both_bounds_are_divided_by_the_upper_one():
    algorithm = nft(advantage_low=-1.0, advantage_high=2.0)
    loss, _ = gradient_at_old(algorithm, batch_of([-5.0, 2.0, 1.0]), normal(2, 3, 2, 3, 3))
    assert loss.metrics["optimality"].tolist() == pytest.approx([0.25, 1, 0.75])


# ---- the loss, where current and old are the same


def test_at_the_old_policy_and_advantage_0_the_gradient_is_exactly_0():
    _, gradient = gradient_at_old(nft(nft_beta=0.3), batch_of([0.0, 0.0]), normal(2, 2, 2, 3, 3))
    assert gradient.count_nonzero() == 0


def test_at_the_old_policy_the_loss_is_the_same_for_every_reward():
    batch, old = batch_of([-5.0, 0.0, 5.0], t=[0.6, 0.6, 0.6]), normal(2, 3, 2, 3, 3)
    error = (batch.t.view(-1, 1, 1, 1) * (batch.noise - batch.x_0 - old)).flatten(1)
    expected = 5 / 0.5 * error.square().mean(1) / error.abs().mean(1)
    loss, _ = gradient_at_old(nft(nft_beta=0.5), batch, old)
    assert torch.allclose(loss.per_sample, expected)


def test_good_and_bad_samples_have_opposite_gradients():
    old, x_0 = normal(2, 1, 2, 3, 3), normal(0, 1, 2, 3, 3)
    gradients = [gradient_at_old(nft(), batch_of([a], x_0=x_0), old)[1] for a in (3.0, -3.0)]
    assert gradients[0].abs().max() > 1e-3
    assert torch.allclose(gradients[0], -gradients[1], rtol=1e-5, atol=0)


def test_the_gradient_is_the_advantage_times_the_old_errors_gradient():
    """d L / d v = (2 r - 1) hi d L_old / d v."""
    batch, old = batch_of([2.0]), normal(2, 1, 2, 3, 3)
    probe = old.clone().requires_grad_()
    error = batch.t.view(-1, 1, 1, 1) * (batch.noise - batch.x_0 - probe)
    (expected,) = torch.autograd.grad(error.square().mean() / error.detach().abs().mean(), probe)
    _, gradient = gradient_at_old(nft(), batch, old)
    assert torch.allclose(gradient, 0.4 * 5 * expected, rtol=1e-4, atol=1e-7)


def test_the_gradient_does_not_depend_on_beta_and_the_loss_falls_with_it():
    batch, old = batch_of([4.0, -1.0]), normal(2, 2, 2, 3, 3)
    (one, at_one), (tenth, at_tenth) = (gradient_at_old(nft(nft_beta=beta), batch, old) for beta in (1.0, 0.1))
    assert torch.allclose(at_one, at_tenth, rtol=1e-5, atol=1e-7)
    assert torch.allclose(tenth.per_sample, 10 * one.per_sample, rtol=1e-5)


# ---- the loss, elsewhere


def test_the_error_of_x_0_is_a_velocity_error_weighted_by_t_and_by_its_own_size():
    """L = t mean(a^2) / mean|a|, a the velocity's error; told apart by r = 1, which leaves only the positive branch."""
    batch, current = batch_of([5.0, 5.0]), normal(3, 2, 2, 3, 3)
    loss = loss_of(nft(), batch, current, behaviour=normal(2, 2, 2, 3, 3))
    wrong = (current - (batch.noise - batch.x_0)).flatten(1)
    assert torch.allclose(loss.per_sample, 5 * batch.t * wrong.square().mean(1) / wrong.abs().mean(1))


def reference_loss(
    batch: Batch, current: np.ndarray, old: np.ndarray, ref: np.ndarray, beta: float, kl: float
) -> list[Any]:
    """The loss from its definition, sample by sample in numpy float64, by way of x_t and the estimates of x_0."""
    losses = []
    assert batch.advantages is not None
    given = (tensor.numpy() for tensor in (batch.x_0, batch.noise, batch.t, batch.advantages))
    for x_0, e, t, advantage, v, v_old, v_ref in zip(*given, current, old, ref, strict=True):
        x_t = (1 - t) * x_0 + t * e
        r = min(max(max(min(advantage, 5), -5) / 10 + 0.5, 0), 1)
        branches = []
        for mixed in (beta * v + (1 - beta) * v_old, (1 + beta) * v_old - beta * v):
            estimate = x_t - t * mixed
            branches.append(((estimate - x_0) ** 2 / max(abs(estimate - x_0).mean(), 1e-5)).mean())
        policy = 5 / beta * (r * branches[0] + (1 - r) * branches[1])
        losses.append(policy + kl * ((v - v_ref) ** 2).mean())
    return losses


@pytest.mark.parametrize("beta", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("video", [False, True])
def test_the_loss_equals_its_definition_recomputed_in_float64(beta: float, video: bool):
    shape = (4, 2, 3, 2, 2) if video else (4, 2, 3, 3)
    batch = batch_of([2.0, -8.0, 0.3, 5.0], x_0=normal(0, *shape, dtype=torch.float64), t=[0.0089, 0.3, 0.9, 1.0])
    current, old, ref = (normal(seed, *shape, dtype=torch.float64) for seed in (2, 3, 4))
    expected = reference_loss(batch, current.numpy(), old.numpy(), ref.numpy(), beta, 0.7)
    loss = loss_of(nft(nft_beta=beta, kl_beta=0.7), batch, current, behaviour=old, reference=ref)
    assert loss.per_sample.tolist() == pytest.approx(expected, rel=1e-12)

    assert batch.advantages is not None
    single = Batch(batch.x_0.float(), batch.noise.float(), batch.t.float(), batch.advantages.float())
    loss = loss_of(
        nft(nft_beta=beta, kl_beta=0.7), single, current.float(), behaviour=old.float(), reference=ref.float()
    )
    assert loss.per_sample.dtype == torch.float32
    assert loss.per_sample.tolist() == pytest.approx(expected, rel=1e-5)


def test_the_weight_of_a_perfect_velocity_has_a_floor():
    """At a velocity error of 1e-6, t = 1: 1e-12 over 1e-5 instead of over 1e-6."""
    batch = batch_of([5.0], x_0=torch.zeros(1, 1, 1, 1, device=CPU), t=[1.0])
    loss = loss_of(nft(), batch, batch.noise + 1e-6, behaviour=batch.noise)
    # the float32 sum of noise and 1e-6 is rounded, hence the wide tolerance
    assert float(loss.per_sample) == pytest.approx(5 * 1e-12 / 1e-5, rel=0.15)


def test_the_weight_carries_no_gradient():
    """With r = 1 and one dimension L = hi t a^2 / |a|: slope 2 hi t without the weight's gradient, hi t with it."""
    batch = batch_of([5.0], x_0=torch.zeros(1, 1, 1, 1, device=CPU), t=[0.5])
    current = (batch.noise + 2).requires_grad_()
    loss = loss_of(nft(), batch, current, behaviour=batch.noise)
    (gradient,) = torch.autograd.grad(loss.per_sample.sum(), current)
    assert float(gradient) == pytest.approx(2 * 5 * 0.5, rel=1e-5)


def test_without_the_weight_the_optimum_is_the_known_one():
    """v* = v_old + (2 r - 1) / beta (v_data - v_old) = 1.26 for v_old = .3, v_data = 1.1, beta = .5, r = .8.

    The weight is taken out by multiplying each branch by it: at the optimum the branches' squared errors balance.
    """
    old, data, beta, r = 0.3, 1.1, 0.5, 0.8
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.float64, device=CPU)
    batch = Batch(x_0=zero - data, noise=zero, t=zero.view(1) + 1, advantages=zero.view(1))

    def branch(current: torch.Tensor, advantage: float, wrong: torch.Tensor) -> torch.Tensor:
        given = Batch(batch.x_0, batch.noise, batch.t, batch.t * advantage)
        return loss_of(nft(nft_beta=beta), given, current, behaviour=zero + old).per_sample * wrong.detach().abs()

    def slope(v: float) -> float:
        current = (zero + v).requires_grad_()
        good = branch(current, 5.0, beta * current + (1 - beta) * old - data).sum()
        bad = branch(current, -5.0, (1 + beta) * old - beta * current - data).sum()
        return float(torch.autograd.grad(r * good + (1 - r) * bad, current)[0])

    assert slope(1.26) == pytest.approx(0, abs=1e-9)
    assert slope(1.25) < 0 < slope(1.27)


# ---- each sample's own reward, whatever the batch


def linear_gradient(advantages: list[float], mini_batch: int) -> torch.Tensor:
    """Total gradient at the weights of a linear velocity, over micro-batches of the same 6 samples."""
    weight = torch.eye(4, device=CPU).requires_grad_()
    whole = batch_of(advantages, x_0=normal(0, 6, 4))
    assert whole.advantages is not None
    for start in range(0, 6, mini_batch):
        cut = slice(start, start + mini_batch)
        part = Batch(whole.x_0[cut], whole.noise[cut], whole.t[cut], whole.advantages[cut])
        old = (part.x_t @ torch.eye(4, device=CPU)).detach()
        loss_of(nft(), part, part.x_t @ weight, behaviour=old).per_sample.sum().backward()
    assert weight.grad is not None
    return weight.grad


def test_swapping_the_advantages_of_two_samples_changes_the_gradient():
    """Also where they sum to 0, where a reward spread over the batch would give none at all."""
    one, other = (linear_gradient(list(a), 6) for a in ([3, -3, 0, 0, 0, 0], [-3, 3, 0, 0, 0, 0]))
    assert one.abs().max() > 0.1
    assert torch.allclose(one, -other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mini_batch", [1, 2, 3, 4])
def test_the_size_of_the_micro_batch_does_not_change_the_total_gradient(mini_batch: int):
    advantages = [3.0, -1.0, 0.5, -4.0, 2.0, 0.0]
    assert torch.allclose(linear_gradient(advantages, mini_batch), linear_gradient(advantages, 6), rtol=1e-5, atol=1e-6)


# ---- the distance to the reference


def test_equal_current_and_reference_have_no_kl():
    batch, current = batch_of([1.0]), normal(2, 1, 2, 3, 3)
    loss = loss_of(nft(kl_beta=1.0), batch, current, behaviour=normal(3, 1, 2, 3, 3), reference=current.clone())
    assert loss.metrics["kl"].tolist() == [0]
    assert torch.equal(loss.per_sample.detach(), loss.metrics["policy_loss"])


def test_the_loss_is_the_policy_loss_plus_kl_beta_times_the_squared_distance():
    batch, current = batch_of([1.0, -2.0]), normal(2, 2, 2, 3, 3)
    loss = loss_of(nft(kl_beta=0.25), batch, current, behaviour=current + 2, reference=current - 3)
    assert loss.metrics["kl"].tolist() == pytest.approx([9, 9])
    assert loss.metrics["old_deviation"].tolist() == pytest.approx([4, 4])
    assert torch.allclose(loss.per_sample, loss.metrics["policy_loss"] + 0.25 * 9)


@pytest.mark.parametrize(
    ("kl_beta", "asked"), [(0.0, ["behaviour", "current"]), (0.1, ["behaviour", "reference", "current"])]
)
def test_the_reference_is_evaluated_only_if_it_counts_and_current_comes_last(kl_beta: float, asked: list[str]):
    batch, parts = batch_of([1.0]), []
    algorithm = nft(kl_beta=kl_beta)
    algorithm.loss(lambda part: parts.append(part) or batch.noise, batch)
    assert parts == asked
    assert set(algorithm.needs.roles) == set(asked)


def test_neither_old_nor_reference_nor_the_metrics_get_a_gradient():
    batch = batch_of([1.0])
    parts = {name: normal(2, 1, 2, 3, 3).requires_grad_() for name in ("current", "behaviour", "reference")}
    loss = nft(kl_beta=1.0).loss(parts.__getitem__, batch)
    loss.per_sample.sum().backward()
    assert [name for name, value in parts.items() if value.grad is not None] == ["current"]
    assert not any(value.requires_grad for value in loss.metrics.values())
    assert {tuple(value.shape) for value in loss.metrics.values()} == {(1,)}


# ---- advantages


def scored(rewards: dict[str, list[float | None]]) -> pd.DataFrame:
    """Samples by prompt; None failed."""
    rows = [(f"{prompt}-{i}", prompt, reward) for prompt, given in rewards.items() for i, reward in enumerate(given)]
    samples = pd.DataFrame(rows, columns=["sample_id", "prompt_id", "reward"])
    return samples.assign(valid=samples["reward"].notna())


def advantages_of(rewards: dict[str, list[float | None]], **options: Any) -> list[float]:
    return nft(**options).advantages(scored(rewards))["advantage"].tolist()


def test_a_pair_of_rewards_has_the_known_advantages():
    assert advantages_of({"a": [1, 3]}, global_std=False) == pytest.approx([-1 / 1.0001, 1 / 1.0001], rel=1e-12)


def test_the_prompts_own_deviation_is_the_population_one():
    deviation = np.sqrt(1.25) + 1e-4
    expected = [-1.5 / deviation, -0.5 / deviation, 0.5 / deviation, 1.5 / deviation]
    assert advantages_of({"a": [1, 2, 3, 4]}, global_std=False) == pytest.approx(expected, rel=1e-12)


def test_the_global_deviation_is_over_all_rewards_and_the_mean_still_the_prompts():
    deviation = np.std([1, 3, 11, 13]) + 1e-4
    expected = [-1 / deviation, 1 / deviation] * 2
    assert advantages_of({"a": [1, 3], "b": [11, 13]}, global_std=True) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("global_std", [False, True])
def test_equal_rewards_have_exactly_no_advantage_and_stay_in_use(global_std: bool):
    table = nft(global_std=global_std).advantages(scored({"a": [0.1, 0.1, 0.1], "b": [0.7, 0.7, 0.7]}))
    assert table["advantage"].tolist() == [0] * 6
    assert table["used"].tolist() == [True] * 6


@pytest.mark.parametrize("global_std", [False, True])
def test_a_failed_sample_counts_in_no_mean_and_no_deviation(global_std: bool):
    with_failure = advantages_of({"a": [1, None, 3]}, global_std=global_std)
    assert np.isnan(with_failure[1])
    assert [with_failure[0], with_failure[2]] == advantages_of({"a": [1, 3]}, global_std=global_std)


def test_a_failed_sample_is_excluded_whatever_its_reward_says():
    samples = scored({"a": [1, 99, 3]})
    samples["valid"] = [True, False, True]
    table = nft(global_std=False).advantages(samples)
    assert table["used"].tolist() == [True, False, True]
    assert table["advantage"][[0, 2]].tolist() == advantages_of({"a": [1, 3]}, global_std=False)


def test_a_prompt_with_too_few_scores_is_dropped_and_still_counts_in_the_global_deviation():
    table = nft(min_group_size=3).advantages(scored({"a": [1, None, 3], "b": [1, 2, 3]}))
    assert table["used"].tolist() == [False] * 3 + [True] * 3
    assert table["advantage"].isna().tolist() == [True] * 3 + [False] * 3
    deviation = np.std([1, 3, 1, 2, 3]) + 1e-4
    assert table["advantage"].tolist()[3:] == pytest.approx([-1 / deviation, 0, 1 / deviation])


def test_if_every_sample_failed_none_is_used():
    table = nft().advantages(scored({"a": [None, None]}))
    assert table["used"].tolist() == [False, False]
    assert table["advantage"].isna().tolist() == [True, True]


def test_advantages_are_added_without_a_change_of_rows_and_columns():
    samples = scored({"a": [1, 3], "b": [5, 2]}).sample(frac=1, random_state=3).assign(member=[3, 1, 0, 2])
    table = nft(global_std=False).advantages(samples)
    pd.testing.assert_frame_equal(table.drop(columns=["advantage", "used"]), samples)
    by_id = dict(zip(table["sample_id"], table["advantage"], strict=True))
    assert by_id["a-0"] < 0 < by_id["a-1"]
    assert by_id["b-1"] < 0 < by_id["b-0"]


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_valid_sample_without_a_finite_reward_is_wrong_data(reward: float):
    samples = scored({"a": [1, reward, 3]}).assign(valid=True)
    with pytest.raises(ArtifactError, match="a-1"):
        nft().advantages(samples)


# ---- clocks, counts and options


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("none", {0: 0, 1: 0, 1000: 0}),
        ("linear", {0: 0, 1: 0.001, 100: 0.1, 499: 0.499, 500: 0.5, 5000: 0.5}),
        ("delayed", {0: 0, 74: 0, 75: 0, 76: 0.0075, 100: 0.1875, 208: 0.9975, 209: 0.999, 5000: 0.999}),
    ],
)
def test_the_memory_of_the_old_copy_follows_its_table(kind: str, expected: dict[int, float]):
    algorithm = nft(weight_copy_decay_type=kind)
    assert {k: algorithm.options.old_decay(k) for k in expected} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("num_steps", "fraction", "count"), [(10, 0.99, 9), (10, 1.0, 10), (4, 0.5, 2), (1, 1.0, 1)])
def test_the_share_of_noise_levels_is_rounded_down(num_steps: int, fraction: float, count: int):
    assert nft(timesteps_fraction=fraction).needs.num_times(num_steps) == count


def test_a_share_that_leaves_no_noise_level_is_refused():
    with pytest.raises(ConfigError, match=r"timesteps_fraction = 0.2 of num_steps = 4"):
        nft(timesteps_fraction=0.2).needs.num_times(4)


WRONG = {"kl_beta": -1.0, "nft_beta": 0.0, "timesteps_fraction": 1.1, "min_group_size": 1, "weight_copy_decay_type": 3}


@pytest.mark.parametrize(("field", "value"), [*WRONG.items(), ("advantage_high", 0.0), ("timestep_fraction", 0.9)])
def test_options_out_of_bounds_or_misspelt_are_refused(field: str, value: float):
    with pytest.raises(ValueError, match=field):
        nft(**{field: value})


def test_rollouts_come_from_the_old_copy():
    assert (nft().needs.behaviour, Options.rewarded) == ("old", True)


def test_the_algorithms_import_no_torch():
    probe = "import sys, json, cosmos_rl_core.algorithms.nft, cosmos_rl_core.algorithms.sft; "
    probe += "print(json.dumps('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) is False
