"""Settings of rewards and gates: their bounds, and what identifies them."""

from typing import Any

import pytest
from pydantic import ValidationError

from cosmos_rl_core.algorithms import nft
from cosmos_rl_core.config.train import RewardConfig

PROMPTS = {"type": "nft", "dataset": {"name": "mock"}}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"role": "gate"}, "needs a bound"),
        ({"role": "gate", "min": 2, "max": 1}, "no score passes a gate with min = 2 above max = 1"),
        ({"role": "monitor", "min": 2}, "min without effect: role = 'monitor'"),
        ({"on_fail": "worst"}, "on_fail without effect: role = 'train'"),
    ],
)
def test_bounds_are_refused_on_rewards_that_are_no_gates(settings: dict[str, Any], says: str):
    with pytest.raises(ValidationError, match=says):
        RewardConfig.model_validate({"fn": {"name": "jpeg"}, **settings})


def test_unused_settings_of_rewards_change_no_identity():
    plain = RewardConfig.model_validate({"fn": {"name": "jpeg"}}).identity()
    assert {*plain} == {"fn", "weight", "role", "max_attempts", "max_failed_fraction"}
    assert "mixing" not in nft.Options.model_validate(PROMPTS).identity()
