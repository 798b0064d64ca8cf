"""Advantages of rewards that are mixed after each was normalised."""

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError

from cosmos_rl_core.algorithms import grpo, nft
from cosmos_rl_core.algorithms._advantages import decoupled, floor_share
from cosmos_rl_core.algorithms._base import algorithm_of

PROMPTS = {"type": "nft", "dataset": {"name": "mock"}}


def mixed(weights: dict[str, float], **scores: list[float]) -> np.ndarray:
    """Advantages of DiffusionNFT for scores of samples of two prompts."""
    columns = {f"score.{name}": values for name, values in scores.items()}
    count = len(next(iter(scores.values())))
    table = pd.DataFrame(
        {"sample_id": [*map(str, range(count))], "prompt_id": [*"aabb"][:count], "valid": True, **columns}
    )
    options = nft.Options.model_validate({**PROMPTS, "mixing": "gdpo", "global_std": False})
    return algorithm_of(options).advantages(decoupled(table, weights))["advantage"].to_numpy()


def test_a_weight_of_a_tenth_counts_a_tenth_at_any_scale_of_scores():
    # Normalised, a is -1, 1, -1, 1 and b is 1, -1, -1, 1: a large scale of b must not drown a.
    a, b = [0.0, 2.0, 5.0, 9.0], [7000.0, 5000.0, -1000.0, 1000.0]
    wanted = np.array([-0.9, 0.9, -1.1, 1.1])
    np.testing.assert_allclose(mixed({"a": 1, "b": 0.1}, a=a, b=b), wanted / wanted.std(), rtol=3e-4)
    # Parts of one half of 0.1 and of 10 divide the same way: only the ratio of weights counts.
    np.testing.assert_allclose(mixed({"a": 10, "b": 1}, a=a, b=b), wanted / wanted.std(), rtol=3e-4)


def test_the_floor_of_the_deviation_damps_rewards_with_tiny_spreads():
    prompts, scores = np.array([*"aabb"]), np.array([0.0, 2.0, 5.0, 7.0])
    for scale, lost in ((1.0, 1e-4), (1e-3, 1 / 11), (1e-4, 0.5)):
        assert floor_share(scale * scores, prompts, global_std=False) == pytest.approx(lost, rel=1e-3)
    assert floor_share(1e-4 * scores, prompts, global_std=True) == pytest.approx(1 / (1 + 7.25**0.5))
    assert floor_share(np.array([1.0, 1.0, np.nan, 4.0]), prompts, global_std=False) == 0.0
    # Two rewards of equal weights, one of deviation 1e-4: it counts half.
    a, b = [0.0, 2.0, 0.0, 2.0], [0.0, 2e-4, 2e-4, 0.0]
    found = mixed({"a": 1, "b": 1}, a=a, b=b)
    assert (found[1] - found[3]) / (found[1] + found[3]) == pytest.approx(0.5, rel=1e-3)


def test_equal_scores_of_a_prompt_carry_no_signal_in_the_mix():
    found = mixed({"a": 1, "b": 1}, a=[3, 3, 0, 1], b=[2, 2, 4, 4])
    np.testing.assert_allclose(found, np.array([0, 0, -1, 1]) * np.sqrt(2), rtol=3e-4)


def test_gdpo_is_refused_with_settings_of_other_mixings():
    with pytest.raises(ValidationError, match="set global_std = false"):
        nft.Options.model_validate({**PROMPTS, "mixing": "gdpo"})
    with pytest.raises(ValidationError, match="set reward_average to false"):
        grpo.Options.model_validate({**PROMPTS, "type": "grpo", "mixing": "gdpo"})
    grpo.Options.model_validate({**PROMPTS, "type": "grpo", "mixing": "gdpo", "reward_average": False})
