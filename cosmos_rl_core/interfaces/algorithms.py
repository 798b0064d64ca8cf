"""Names that an algorithm plugin imports: its options and needs, the batches of its loss, advantages of groups."""

from cosmos_rl_core.algorithms._advantages import group_advantages, rewards_of
from cosmos_rl_core.algorithms._base import Algorithm, Batch, Loss, Transitions
from cosmos_rl_core.algorithms._foreign import Foreign
from cosmos_rl_core.algorithms._needs import DataTerm, Needs
from cosmos_rl_core.config.train import AlgorithmOptions, RewardedOptions
from cosmos_rl_core.weights.parts import BEHAVIOUR, CURRENT, EMA, OLD, REFERENCE

__all__ = [
    "BEHAVIOUR",
    "CURRENT",
    "EMA",
    "OLD",
    "REFERENCE",
    "Algorithm",
    "AlgorithmOptions",
    "Batch",
    "DataTerm",
    "Foreign",
    "Loss",
    "Needs",
    "RewardedOptions",
    "Transitions",
    "group_advantages",
    "rewards_of",
]
