"""Flow-DPO against its closed forms: the pairs of a prompt, the loss of a linear model and its gradient."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from cosmos_rl_core.algorithms._base import Batch, Loss
from cosmos_rl_core.algorithms.dpo import Algorithm, Options
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.errors import ArtifactError, ConfigError

CPU = torch.device("cpu")
DATASET = DatasetOptions(name="some prompts")
NUM_PAIRS, DIM = 3, 4


def dpo(**options: Any) -> Algorithm:
    return Algorithm(Options.model_validate({"type": "dpo", "dataset": DATASET, **options}))


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator(device=CPU).manual_seed(seed), device=CPU, dtype=dtype)


def pairs_of(dtype: torch.dtype = torch.float64) -> Batch:
    """Winner, loser, winner, ...: the members of a pair share noise and noise level."""
    noise, t = (torch.cat([drawn, drawn]) for drawn in (normal(1, NUM_PAIRS, DIM), normal(4, NUM_PAIRS).sigmoid()))
    order = torch.arange(2 * NUM_PAIRS, device=CPU).view(2, NUM_PAIRS).T.flatten()
    advantages = torch.tensor([1.0, -1.0] * NUM_PAIRS, device=CPU)
    return Batch(normal(0, 2 * NUM_PAIRS, DIM).to(dtype), noise[order].to(dtype), t[order].to(dtype), advantages)


def loss_of(algorithm: Algorithm, batch: Batch, current: torch.Tensor, reference: torch.Tensor) -> Loss:
    return algorithm.loss({"current": current, "reference": reference}.__getitem__, batch)


# ---- the loss


def by_hand(batch: Batch, weights: np.ndarray, old: np.ndarray, beta: float) -> tuple[list[float], np.ndarray]:
    """Loss of each pair, and the gradient of their mean, of the model ``v = weights x``, pair by pair in numpy."""
    losses, gradient = [], np.zeros_like(weights)
    given = [tensor.numpy() for tensor in (batch.x_0, batch.noise, batch.t)]
    for i in range(0, len(given[2]), 2):
        changes, slopes = [], []
        for x_0, noise, t in ([tensor[row] for tensor in given] for row in (i, i + 1)):
            x_t, target = (1 - t) * x_0 + t * noise, noise - x_0
            changes.append(((weights @ x_t - target) ** 2).mean() - ((old @ x_t - target) ** 2).mean())
            slopes.append(2 / DIM * np.outer(weights @ x_t - target, x_t))
        margin = -beta / 2 * (changes[0] - changes[1])
        losses.append(math.log1p(math.exp(-margin)))
        gradient += beta / 2 * (slopes[0] - slopes[1]) / (1 + math.exp(margin)) / NUM_PAIRS
    return losses, gradient


@pytest.mark.parametrize("beta", [0.5, 3.0])
def test_loss_and_gradient_of_a_linear_model_match_the_closed_form(beta: float):
    batch, old = pairs_of(), normal(2, DIM, DIM)
    weights = (old + 0.3 * normal(3, DIM, DIM)).requires_grad_()
    losses, expected = by_hand(batch, weights.detach().numpy(), old.numpy(), beta)
    loss = loss_of(dpo(beta=beta), batch, batch.x_t @ weights.T, batch.x_t @ old.T)
    assert loss.per_sample.tolist() == pytest.approx(np.repeat(losses, 2).tolist(), rel=1e-12)
    (gradient,) = torch.autograd.grad(loss.per_sample.mean(), weights)
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-10)


def test_at_the_reference_the_loss_is_exactly_log_2_and_pulls_both_members_apart():
    """d L / d v = beta / (2 D) (v - (noise - x_0)) of the winner, and the opposite sign of the loser."""
    batch, reference = pairs_of(torch.float32), normal(2, 2 * NUM_PAIRS, DIM, dtype=torch.float32)
    current = reference.clone().requires_grad_()
    loss = loss_of(dpo(beta=7.0), batch, current, reference)
    assert loss.per_sample.dtype == torch.float32
    assert loss.per_sample.tolist() == [float(torch.tensor(2.0, device=CPU).log())] * 2 * NUM_PAIRS
    assert all(value.tolist() == [0.0] * 2 * NUM_PAIRS for value in loss.metrics.values())
    (gradient,) = torch.autograd.grad(loss.per_sample.sum() / 2, current)
    assert batch.advantages is not None
    expected = batch.advantages.view(-1, 1) * 7 / (2 * DIM) * (reference - (batch.noise - batch.x_0))
    assert torch.allclose(gradient, expected, rtol=1e-5)


def test_metrics_say_how_both_errors_changed():
    batch, reference, current = pairs_of(), normal(2, 2 * NUM_PAIRS, DIM), normal(3, 2 * NUM_PAIRS, DIM)
    target = batch.noise - batch.x_0
    change = (current - target).square().mean(1) - (reference - target).square().mean(1)
    metrics = loss_of(dpo(beta=2.0), batch, current, reference).metrics
    margin = change[1::2] - change[::2]
    expected = {"winner_error_change": change[::2], "loser_error_change": change[1::2], "margin": margin}
    for name, value in (expected | {"accuracy": (margin > 0).double()}).items():
        assert metrics[name].tolist() == pytest.approx(value.repeat_interleave(2).tolist())
    assert 0 < float(metrics["accuracy"].mean()) < 1


def test_loss_and_gradient_are_finite_at_any_margin():
    batch, reference = pairs_of(torch.float32), torch.zeros(2 * NUM_PAIRS, DIM, device=CPU)
    for sign in (1, -1):
        target = batch.noise - batch.x_0
        current = torch.where(torch.arange(6, device=CPU).view(-1, 1) % 2 == (sign < 0), target, -50 * target)
        loss = loss_of(dpo(beta=1e5), batch, current.requires_grad_(), reference)
        (gradient,) = torch.autograd.grad(loss.per_sample.sum(), current)
        assert gradient.isfinite().all()
        expected = (-loss.metrics["margin"]).clamp(min=0)
        assert torch.allclose(loss.per_sample, expected)
        assert (loss.metrics["margin"].sign() == sign).all()


# ---- pairs


def scored(rewards: dict[str, list[float | None]]) -> pd.DataFrame:
    rows = [(f"{prompt}{i}", prompt, one) for prompt, group in rewards.items() for i, one in enumerate(group)]
    samples = pd.DataFrame(rows, columns=["sample_id", "prompt_id", "reward"]).astype({"reward": "float64"})
    return samples.assign(valid=samples["reward"].notna())


def paired(samples: pd.DataFrame, **options: Any) -> tuple[list[str], dict[str, int], pd.DataFrame]:
    """Pairs as "winner>loser", and how many each sample would have won."""
    table = dpo(**options).advantages(samples)
    rows = zip(table["sample_id"], table["beats"], strict=True)
    pairs = [f"{winner}>{loser}" for winner, losers in rows for loser in losers.split()]
    dropped = dict(zip(table["sample_id"], table["dropped"], strict=True))
    return pairs, {name: count for name, count in dropped.items() if count}, table


def test_best_and_worst_of_each_prompt_are_a_pair():
    pairs, dropped, table = paired(scored({"a": [1, 4, 2, 0], "b": [5, 5.5]}))
    assert (pairs, dropped) == (["a1>a3", "b1>b0"], {})
    assert table["used"].tolist() == [False, True, False, True, True, True]
    assert table["advantage"].fillna(9).tolist() == [9, 1, 9, -1, -1, 1]


def test_all_pairs_has_every_two_samples_and_advantages_are_shares_of_pairs_won():
    pairs, dropped, table = paired(scored({"a": [1, 3, 2], "b": [7, 6]}), pairs="all")
    assert (sorted(pairs), dropped) == (["a1>a0", "a1>a2", "a2>a0", "b0>b1"], {})
    assert table["advantage"].tolist() == [-1, 1, 0, 1, -1]
    assert all(table["used"])
    assert dpo(pairs="all").needs.most_units(3) == 3


def test_equal_rewards_and_small_gaps_are_left_out_and_counted():
    rewards = scored({"a": [1, 1, 1], "b": [1, 2, 2], "c": [3, 3.25, 9]})
    assert paired(rewards)[:2] == (["b1>b0", "c2>c0"], {"a0": 1})
    assert paired(rewards, min_gap=1.0)[:2] == (["b1>b0", "c2>c0"], {"a0": 1})
    assert paired(rewards, min_gap=1.5)[:2] == (["c2>c0"], {"a0": 1, "b1": 1})
    pairs, dropped, _ = paired(rewards, pairs="all", min_gap=0.5)
    assert sorted(pairs) == ["b1>b0", "b2>b0", "c2>c0", "c2>c1"]
    assert dropped == {"a0": 2, "a1": 1, "b1": 1, "c1": 1}


def test_samples_without_a_reward_are_in_no_pair():
    samples = scored({"a": [None, 1, 2, None], "b": [3, None]})
    pairs, dropped, table = paired(samples, pairs="all")
    assert (pairs, dropped) == (["a2>a1"], {})
    assert table["used"].tolist() == [False, True, True, False, False, False]
    samples.loc[0, ["valid", "reward"]] = [True, math.inf]
    with pytest.raises(ArtifactError, match="a0"):
        paired(samples)


def test_a_sample_that_a_gate_holds_back_loses():
    """It has the lowest reward of the others, and its place below them."""
    held = scored({"a": [1, 1, 4]}).assign(held=[False, True, False])
    assert paired(held)[:2] == (["a2>a1"], {})
    assert paired(held, pairs="all")[:2] == (["a2>a0", "a2>a1"], {"a0": 1})


def test_a_prompt_has_at_most_as_many_pairs_as_plans_count():
    for kind, most in (("best_worst", [0, 1, 1, 1]), ("all", [0, 1, 3, 6])):
        needs = dpo(pairs=kind).needs
        assert [needs.most_units(size) for size in (1, 2, 3, 4)] == most
        groups: dict[str, list[float | None]] = {str(size): [*map(float, range(size))] for size in (1, 2, 3, 4)}
        pairs, _, _ = paired(scored(groups), pairs=kind)
        assert len(pairs) == sum(most)


# ---- preferences of people


def given(file: Path, pairs: list[str], **options: Any) -> Algorithm:
    """The algorithm as planned with a file of pairs, each "winner>loser"."""
    rows = [dict(zip(("winner", "loser"), pair.split(">"), strict=True)) for pair in pairs]
    lines = [json.dumps(row) for row in rows]
    if file.suffix == ".csv":
        lines = ["winner,loser", *(",".join(row.values()) for row in rows)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Algorithm(dpo(pairs="file", preferences=str(file), **options).options.pinned())


PAIR = '{"winner": "a0", "loser": "a1"}\n'


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.csv"])
def test_a_file_decides_pairs_whatever_the_rewards(name: str, tmp_path: Path):
    algorithm = given(tmp_path / name, ["a0>a1", "a2>a1", "b1>b0", "elsewhere-1>elsewhere-2", "a0>elsewhere-1"])
    assert algorithm.needs.given_pairs == 5
    table = algorithm.advantages(scored({"a": [1, 5, 2, 9], "b": [3, None]}))
    assert table["beats"].tolist() == ["a1", "", "a1", "", "", ""]
    assert table["dropped"].tolist() == [0, 0, 0, 0, 0, 1]  # b1 has no score
    assert table["advantage"].fillna(9).tolist() == [1, -1, 1, 9, 9, 9]


@pytest.mark.parametrize(("name", "text"), [("p.csv", "winner,loser\r\na0,a1\r\n"), ("p.jsonl", PAIR)])
def test_a_file_of_a_spreadsheet_may_begin_with_a_byte_order_mark(name: str, text: str, tmp_path: Path):
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    options = dpo(pairs="file", preferences=str(tmp_path / name)).options.pinned()
    assert options.preferences_count == 1


def test_a_rollout_without_any_pair_of_the_file_is_refused(tmp_path: Path):
    algorithm = given(tmp_path / "p.jsonl", ["x>y", "a0>y"])
    with pytest.raises(ArtifactError, match="2 pairs; none has both its samples among the 2 samples of this rollout"):
        algorithm.advantages(scored({"a": [1, 5]}))


def test_a_pair_of_two_prompts_is_refused(tmp_path: Path):
    algorithm = given(tmp_path / "p.jsonl", ["a0>b0"])
    with pytest.raises(ArtifactError, match="compares a0 and b0, which are of different prompts"):
        algorithm.advantages(scored({"a": [1, 5], "b": [2, 3]}))


def test_a_file_that_changed_since_it_was_planned_is_refused(tmp_path: Path):
    file, samples = tmp_path / "p.jsonl", scored({"a": [1, 5]})
    algorithm = given(file, ["a0>a1"])
    assert algorithm.options.identity()["preferences_count"] == 1
    assert "preferences" not in algorithm.options.identity()
    file.write_text('{"winner": "a1", "loser": "a0"}\n', encoding="utf-8")
    with pytest.raises(ArtifactError, match="has changed: found sha256"):
        algorithm.advantages(samples)
    with pytest.raises(ConfigError, match="leave the digest out"):
        algorithm.options.pinned()
    file.unlink()
    with pytest.raises(ArtifactError, match="cannot be read"):
        algorithm.advantages(samples)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("p.jsonl", "", "it is empty"),
        ("p.jsonl", '{"winner": "a"}', "pair 1: loser Field required"),
        ("p.jsonl", '{"winner": "a", "loser": "b", "by": "c"}', "pair 1: by Extra inputs"),
        ("p.jsonl", '{"winner": "a", "loser": "b"}\nno', "pair 2: .* 1 of 2 rows are no preferences"),
        ("p.jsonl", '{"winner": "a", "loser": "a"}', "a cannot win against itself"),
        ("p.csv", "winner,looser\na,b\n", "pair 1: loser Field required"),
        ("p.csv", "winner,loser\n", "it is empty"),
    ],
)
def test_invalid_preferences_are_refused_when_a_run_is_planned(name: str, text: str, says: str, tmp_path: Path):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=says):
        dpo(pairs="file", preferences=str(tmp_path / name)).options.pinned()
    with pytest.raises(ConfigError, match="cannot be read"):
        dpo(pairs="file", preferences=str(tmp_path / "none")).options.pinned()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pairs": "file"}, "needs `preferences`"),
        ({"preferences": "p.jsonl"}, "preferences without effect: pairs = 'best_worst'"),
        ({"pairs": "file", "preferences": "p.jsonl", "min_gap": 0.5}, "min_gap = 0.5 without effect"),
        ({"mini_batch": 1}, "mini_batch"),
        ({"beta": 0}, "beta"),
    ],
)
def test_settings_without_effect_or_out_of_bounds_are_refused(options: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        dpo(**options)
