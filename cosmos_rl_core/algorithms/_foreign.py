"""Rollouts of other policies, for any algorithm."""

from pydantic import Field

from cosmos_rl_core.config.base import NOT_IDENTITY, Section
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.weights.parts import Anchor


class Foreign(Section):
    """Stored rollouts of another policy than the run's own, and how a loss treats them."""

    anchor: Anchor
    """Weights that the loss reads as ``behaviour``: the run's own copy, or the weights that made the rollouts."""
    lora: LoraConfig | None
    """Settings of the adapter that made the rollouts."""
    max_drift: float = Field(json_schema_extra=NOT_IDENTITY)
    """Largest drift at which training begins. Affects success, not the result."""
