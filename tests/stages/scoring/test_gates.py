"""Gates, which hold samples back from what trains."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from cosmos_rl_core.algorithms import ddrl, grpo, nft
from cosmos_rl_core.algorithms._advantages import decoupled
from cosmos_rl_core.algorithms._base import algorithm_of
from cosmos_rl_core.config.train import Gate
from cosmos_rl_core.errors import GateError
from stages.scoring.rewards import gated, held_back_prompts, placed

PROMPTS = {"type": "nft", "dataset": {"name": "mock"}}


def gate(on_fail: Any = "exclude", most: float = 0.9, **bounds: float) -> Gate:
    return Gate(**({"min": None, "max": None} | bounds), on_fail=on_fail, max_gated_fraction=most)


def test_a_gate_is_read_from_its_identity():
    assert Gate.model_validate(gate(min=0.2).identity()).why_not(0.1) == "0.1 < min 0.2"


def samples(rewards: list[float | None], gate: list[float | None], prompts: str = "aaaa") -> pd.DataFrame:
    """Samples with a reward, ``None`` if there is none, and the score of the gate ``g``."""
    scores = np.array([np.nan if one is None else one for one in rewards])
    judged = np.array([np.nan if one is None else one for one in gate])
    return pd.DataFrame(
        {
            "sample_id": [f"s{i}" for i in range(len(rewards))],
            "prompt_id": [*prompts],
            "reward": scores,
            "valid": ~np.isnan(scores) & ~np.isnan(judged),
            "reward.r": scores,
            "gate.g": judged,
        }
    )


def test_a_gated_sample_is_left_out_with_the_reason():
    found = gated(samples([1, 2, 3, 4], [0.5, 0.1, 0.9, None]), {"g": gate(min=0.2, max=0.8)})
    assert [*found["valid"]] == [True, False, False, False]
    assert [*found["gated"]] == ["", "g 0.1 < min 0.2: exclude", "g 0.9 > max 0.8: exclude", "g has no score"]
    assert [*found["reward"].fillna(-9)] == [1, -9, -9, -9]


def test_a_score_equal_to_a_bound_passes():
    found = gated(samples([1, 2], [0.2, 0.8], "aa"), {"g": gate(min=0.2, max=0.8)})
    assert [*found["valid"]] == [True, True]


def test_a_gated_sample_gets_the_lowest_reward_of_its_prompts_samples_that_pass():
    table = samples([5, 1, 7, None, 8, 9], [0.0, 1, 1, 0.0, 0.0, 1], "aaaabb")
    found = placed(gated(table, {"g": gate("worst", min=0.5)}))
    assert [*found["reward"].fillna(-9)] == [1, 1, 7, -9, 9, 9]
    assert [*found["reward.r"].fillna(-9)] == [1, 1, 7, -9, 9, 9]
    assert [*found["valid"]] == [True, True, True, False, True, True]
    assert [*found["held"]] == [True, False, False, False, True, False]
    assert found["gated"].tolist()[0] == "g 0 < min 0.5: worst"


@pytest.mark.parametrize("on_fail", ["worst", "exclude"])
def test_a_prompt_without_a_sample_that_passes_teaches_nothing(on_fail: Any):
    table = gated(samples([5, 1, 7, 2], [0.0, 0.0, 1, 1], "aabb"), {"g": gate(on_fail, min=0.5)})
    table = placed(table) if on_fail == "worst" else table
    assert [*table["valid"]] == [False, False, True, True]
    assert held_back_prompts(table.assign(rollout="r")) == 1


ALGORITHMS: dict[str, Any] = {
    "nft, sum": nft.Options.model_validate(PROMPTS),
    "nft, own deviation": nft.Options.model_validate({**PROMPTS, "global_std": False}),
    "nft, gdpo": nft.Options.model_validate({**PROMPTS, "mixing": "gdpo", "global_std": False}),
    "grpo, average": grpo.Options.model_validate({**PROMPTS, "type": "grpo"}),
    "grpo, exponential average": grpo.Options.model_validate({**PROMPTS, "type": "grpo", "exp_reward": True}),
    "grpo, average, one deviation": grpo.Options.model_validate({**PROMPTS, "type": "grpo", "global_std": True}),
    "grpo, sum": grpo.Options.model_validate({**PROMPTS, "type": "grpo", "reward_average": False}),
    "grpo, gdpo": grpo.Options.model_validate({**PROMPTS, "type": "grpo", "reward_average": False, "mixing": "gdpo"}),
    "ddrl": ddrl.Options.model_validate({**PROMPTS, "type": "ddrl", "data_beta": 0}),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_gated_sample_always_has_the_lowest_advantage_of_its_prompt(name: str):
    options = ALGORITHMS[name]
    mixing, weights = options.mixing, {"a": 1.0, "b": 0.3, "c": -0.5}
    for seed in range(40):
        draw = np.random.default_rng(seed)
        groups = int(draw.integers(1, 5))
        prompts = np.repeat(np.arange(groups).astype(str), draw.integers(3, 9, groups))
        scales = 10.0 ** draw.integers(-2, 4, len(weights))
        columns = {w: scale * draw.standard_normal(len(prompts)) for w, scale in zip(weights, scales, strict=True)}
        table = pd.DataFrame({"sample_id": [f"s{i}" for i in range(len(prompts))], "prompt_id": prompts})
        table = table.assign(valid=draw.random(len(prompts)) > 0.1, **{"gate.g": draw.random(len(prompts))})
        table = table.assign(**{f"score.{w}": columns[w] for w in weights})
        table = table.assign(**{f"reward.{w}": weights[w] * columns[w] for w in weights})
        table = gated(table.assign(reward=table.filter(like="reward.").sum(axis=1)), {"g": gate("worst", 1.0, min=0.4)})
        found = algorithm_of(options).advantages(placed(decoupled(table, weights) if mixing == "gdpo" else table))
        for prompt in {*found.loc[found["used"], "prompt_id"]}:
            members = (found["used"] & (found["prompt_id"] == prompt)).to_numpy(bool)
            advantages, held = found["advantage"].to_numpy()[members], found["held"].to_numpy(bool)[members]
            assert np.all(advantages[held] == advantages.min())
            if not getattr(options, "exp_reward", False) and np.abs(advantages).max() < 4:
                assert abs(advantages.sum()) < 1e-6
        assert not found.loc[~found["prompt_id"].isin(found.loc[table["valid"], "prompt_id"]), "used"].any()


def test_a_sample_that_the_gate_cannot_score_is_a_failure_and_no_pass():
    found = gated(samples([1, 2], [None, 1], "aa"), {"g": gate("worst", min=0.5)})
    assert [*found["valid"]] == [False, True]


def test_a_gate_that_holds_back_too_many_ends_the_update():
    table = samples([1, 2, 3, 4], [0.0, 0.0, 1, None])
    refused = r"the gate g holds back 2 of 4 samples, more than max_gated_fraction = 0\.4"
    with pytest.raises(GateError, match=refused) as ended:
        gated(table, {"g": gate(most=0.4, min=0.5)})
    # Equal scores are held back again.
    assert not ended.value.retryable
    assert [*gated(table, {"g": gate(most=0.5, min=0.5)})["valid"]] == [False, False, True, False]
