"""What of a stage's settings identifies its artifacts."""

import pytest

from stages import contracts
from stages.artifacts.manifest import Manifest
from stages.scoring.rewards import label_of


@pytest.mark.parametrize(
    ("reward", "label"),
    [
        ({"name": "hpsv2", "model": "/weights"}, "hpsv2"),
        ({"name": "aesthetic", "head": "/weights"}, "aesthetic"),
        ({"name": "remote", "reward_fn": "dance_grpo", "score_key": "x"}, "remote-dance_grpo-x"),
    ],
)
def test_the_folder_of_a_rewards_weights_is_no_part_of_its_label(reward: dict[str, str], label: str):
    """A manifest does not hold where weights lie, so that the same weights elsewhere give the same scores."""
    config = contracts.Reward.model_validate(
        {"reward": reward, "scorer": "s", "max_attempts": 1, "max_failed_fraction": 0.5}
    )
    assert config.reward.label == label
    assert label_of(Manifest.model_construct(config=config.identity())) == label
