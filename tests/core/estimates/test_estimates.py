"""Standard errors against closed forms and simulation, and the rule that one module makes them."""

import ast
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from cosmos_rl_core.estimates.estimate import (
    Estimate,
    Sums,
    mean_of,
    mean_of_estimates,
    mean_of_independent,
    mean_of_sums,
    scaled,
)

ROOT = Path(__file__).resolve().parents[3]


def test_the_error_of_independent_values_is_the_textbook_one():
    values = [1.0, 2.0, 4.0, 9.0]
    found = mean_of_independent(values)
    assert (found.mean, found.n, found.clusters) == (4.0, 4, 4)
    assert found.error == pytest.approx(np.std(values, ddof=1) / 2)


def test_clusters_of_equal_size_have_the_error_of_their_means():
    values, prompts = [0.0, 0.2, 0.9, 1.1, 0.4, 0.6], ["a", "a", "b", "b", "c", "c"]
    found = mean_of(values, prompts)
    assert found.mean == pytest.approx(np.mean(values))
    assert found.error == pytest.approx(np.std([0.1, 1.0, 0.5], ddof=1) / math.sqrt(3))
    assert (found.n, found.clusters) == (6, 3)


def test_repeated_samples_of_a_prompt_tell_nothing_new():
    prompts, means = ["a", "b", "c", "d"], [0.1, 0.4, 0.5, 0.8]
    one, many = mean_of(means, prompts), mean_of(means * 16, prompts * 16)
    assert (many.mean, many.error) == pytest.approx((one.mean, one.error))


def test_values_of_nan_are_left_out():
    found = mean_of([1.0, math.nan, 3.0, math.nan], ["a", "a", "b", "c"])
    assert (found.mean, found.n, found.clusters) == (2.0, 2, 2)


@pytest.mark.parametrize("values", [[], [0.5], [0.5, 0.7, 0.9]])
def test_a_single_cluster_has_no_error(values: list[float]):
    found = mean_of(values, ["a"] * len(values))
    assert math.isnan(found.error)
    assert found.error_shown == ""
    assert not found.decides
    assert math.isnan(found.in_errors)
    assert math.isnan(found.mean) == (not values)


def test_equal_values_have_an_error_of_exactly_zero():
    found = mean_of([0.1] * 12, [*"abcdef"] * 2)
    assert (found.mean, found.error) == (0.1, 0.0)


def test_values_that_are_not_finite_have_no_mean():
    found = mean_of([0.1, math.inf, 0.3], [*"abc"])
    assert math.isnan(found.mean)
    assert math.isnan(found.error)


def test_a_loss_per_token_is_the_ratio_of_both_sums():
    losses, tokens = np.array([4.0, 30.0, 2.0]), np.array([4, 20, 1])
    found = Sums.of(losses, [*"abc"], tokens).estimate
    assert found.mean == pytest.approx(36 / 25)
    gaps = losses - 36 / 25 * tokens
    assert found.error == pytest.approx(math.sqrt(3 / 2 * (gaps**2).sum()) / 25)


def test_a_change_is_the_difference_of_the_two_means_that_are_printed():
    names, tokens = [*"abcd"], np.array([1, 10, 100, 1000])
    before, after = (Sums.of(losses, names, tokens) for losses in (tokens * [2.0, 1, 1, 1], tokens * [1.0, 1, 1, 1.1]))
    change = before.change_to(after)
    # Every conversation counts once in a mean of their own losses a token, which falls.
    assert change.mean == pytest.approx(after.estimate.mean - before.estimate.mean)
    assert change.mean > 0


def test_a_change_of_the_same_samples_is_taken_sample_by_sample():
    before, prompts = np.array([0.1, 0.2, 0.8, 0.9, 0.4, 0.5]), [*"aabbcc"]
    rises = np.array([0.1, 0.3, 0.2, 0.2, 0.0, 0.4])
    found = Sums.of(before, prompts).change_to(Sums.of(before + rises, prompts))
    alone = mean_of(rises, prompts)
    assert (found.mean, found.error, found.n) == pytest.approx((alone.mean, alone.error, 6))


def test_a_change_between_other_prompts_has_the_error_of_independent_means():
    a, b = Sums.of([0.1, 0.4, 0.2], [*"abc"]), Sums.of([0.9, 0.5, 0.6, 0.1], [*"wxyz"])
    found, apart = a.change_to(b), b.estimate.minus(a.estimate)
    assert (found.mean, found.error) == pytest.approx((apart.mean, apart.error))


def test_a_change_with_a_sample_missing_on_one_side_still_is_the_difference_of_the_means():
    a = Sums.of([0.1, 0.2, 0.3, 0.9], [*"aabb"])
    b = Sums.of([0.2, math.nan, 0.4, 0.7], [*"aabb"])
    assert a.change_to(b).mean == pytest.approx(b.estimate.mean - a.estimate.mean)


def test_a_change_from_a_single_cluster_has_no_error():
    one, many = Sums.of([0.1, 0.2], [*"aa"]), Sums.of([0.5, 0.6, 0.7], [*"abc"])
    assert math.isnan(one.change_to(many).error)
    assert math.isnan(many.change_to(one).error)


@pytest.mark.parametrize("sizes", [(16, 16), (2, 30)], ids=["equal", "unequal"])
def test_two_errors_cover_the_truth_in_nineteen_of_twenty_runs(sizes: tuple[int, int]):
    """40 prompts that differ as much among themselves as their samples do, as in the demo."""
    generator = np.random.default_rng(0)
    covered = naive = 0
    for _ in range(1000):
        counts = generator.integers(sizes[0], sizes[1] + 1, 40)
        prompts = np.repeat(np.arange(40), counts)
        values = generator.normal(0, 1, 40)[prompts] + generator.normal(0, 1, len(prompts))
        found = mean_of(values, prompts)
        covered += abs(found.mean) < 2 * found.error
        naive += abs(found.mean) < 2 * mean_of_independent(values).error
    assert 920 <= covered <= 975
    assert naive < 700


def test_two_errors_of_a_paired_change_cover_the_truth():
    """Prompts differ and rise differently; 40 prompts of 16 samples, compared with themselves after training."""
    generator = np.random.default_rng(1)
    covered, ratios = 0, []
    for _ in range(1000):
        prompts = np.repeat(np.arange(40), 16)
        before = generator.normal(0, 1, 40)[prompts] + generator.normal(0, 1, 640)
        after = before + 0.3 + generator.normal(0, 0.2, 40)[prompts] + generator.normal(0, 0.5, 640)
        sums = Sums.of(before, prompts), Sums.of(after, prompts)
        change = sums[0].change_to(sums[1])
        covered += abs(change.mean - 0.3) < 2 * change.error
        ratios.append(sums[1].estimate.minus(sums[0].estimate).error / change.error)
    assert 920 <= covered <= 975
    # Taken as independent, the error is several times too large.
    assert np.mean(ratios) > 4


def test_two_errors_of_a_ratio_cover_the_truth():
    generator, covered = np.random.default_rng(2), 0
    for _ in range(1000):
        tokens = generator.integers(1, 50, 60)
        losses = tokens * (2 + generator.normal(0, 0.5, 60))
        found = Sums.of(losses, np.arange(60), tokens).estimate
        covered += abs(found.mean - 2) < 2 * found.error
    assert 920 <= covered <= 975


def test_three_clusters_decide_nothing_however_small_their_error():
    few, enough = mean_of([1.0, 1.01, 1.02], [*"abc"]), mean_of([1.0, 1.01, 1.02, 1.03], [*"abcd"])
    assert (few.direction, enough.direction) == ("did not clearly change", "rose")
    assert math.isnan(few.in_errors)
    assert enough.in_errors > 100


def test_a_change_without_an_error_is_neither_none_nor_infinite():
    assert math.isnan(scaled(0.5, math.nan))
    assert math.isnan(scaled(0.5, None))
    assert scaled(0.0, 0.0) == 0
    assert scaled(-0.5, 0.0) == -math.inf


def test_the_mean_of_iterations_has_the_error_of_all_of_them():
    found = mean_of_estimates([Estimate(0.2, 0.03, 96, 8), Estimate(0.4, 0.04, 96, 8), Estimate.missing()])
    assert (found.mean, found.error, found.n, found.clusters) == pytest.approx((0.3, 0.025, 192, 16))


def test_iterations_on_the_same_prompts_tell_less_than_iterations_on_others():
    values = [0.1, 0.4, 0.5, 0.8]
    first, again, other = Sums.of(values, [*"abcd"]), Sums.of(values, [*"badc"]), Sums.of(values, [*"efgh"])
    one = first.estimate
    same = mean_of_sums([first, first, first])
    assert (same.mean, same.error, same.n, same.clusters) == pytest.approx((one.mean, one.error, 12, 4))
    apart, plain = mean_of_sums([first, other]), mean_of_estimates([one, other.estimate])
    assert (apart.mean, apart.error, apart.clusters) == pytest.approx((plain.mean, plain.error, plain.clusters))
    # The error of the mean over the same prompts in another order is the error over each prompt's mean.
    means = mean_of(np.mean([values, [0.4, 0.1, 0.8, 0.5]], axis=0), [*"abcd"])
    assert mean_of_sums([first, again]).error == pytest.approx(means.error)
    assert mean_of_sums([first, Sums.of([], [])]) == mean_of_sums([first])
    assert math.isnan(mean_of_sums([first, Sums.of([0.5], ["a"])]).error)
    assert mean_of_sums([]).n == 0


def test_order_and_kind_of_names_change_nothing():
    table = pd.DataFrame({"score": [0.3, 0.1, 0.7, 0.2], "prompt": ["p2", "p1", "p2", "p3"]})
    ordered = table.sort_values("prompt")
    one, other = (mean_of(t["score"], t["prompt"]) for t in (table, ordered))
    assert (one.mean, one.error) == pytest.approx((other.mean, other.error), rel=1e-14)


def test_no_other_module_computes_a_standard_error():
    """Deviations over a root, roots of a ratio of counts, `.sem()` and sums of squared errors belong to one module."""
    folders = ("flows", "stages", "docs", "cosmos_rl_core/reward_service")
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for folder in folders
        for file in sorted((ROOT / folder).rglob("*.py"))
        for line in _made(ast.parse(file.read_text()))
    ]
    assert found == [], "use cosmos_rl_core.estimates.estimate"


def _made(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node) in {"sem", "hypot"}:
            yield node.lineno
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and _name(node.right) == "sqrt":
            yield node.lineno
        if isinstance(node, ast.Call) and _name(node) == "sqrt" and _has_variance(node):
            yield node.lineno


def _has_variance(node: ast.Call) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr == "var" for one in ast.walk(node)) or any(
        isinstance(one, ast.BinOp) and isinstance(one.op, ast.Div) and _name(one.right) == "len"
        for one in ast.walk(node)
    )


def _name(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
