"""Names that a reward plugin imports: its options, the samples that it gets, and the protocols that it may have."""

from cosmos_rl_core.config.reward_facts import Facts
from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.rewards._base import (
    Ask,
    LabelledReward,
    LatentSample,
    NamedReward,
    PreparingReward,
    ProbedReward,
    Reward,
    Sample,
    Scored,
    ServedReward,
    WindowReward,
)
from cosmos_rl_core.rewards._base.served import ServedScorer
from cosmos_rl_core.rewards._batches import each, in_batches

__all__ = [
    "Ask",
    "Facts",
    "LabelledReward",
    "LatentSample",
    "NamedReward",
    "PreparingReward",
    "ProbedReward",
    "Prompt",
    "Reward",
    "RewardOptions",
    "Sample",
    "Scored",
    "ServedReward",
    "ServedScorer",
    "WindowReward",
    "each",
    "in_batches",
]
