"""Destinations of a run's metrics. Field names and defaults are cosmos-rl's; none changes results."""

from typing import Literal

from pydantic import Field

from cosmos_rl_core.config.base import Section


class LoggingConfig(Section):
    """Destinations of a run's metrics, besides ``metrics.jsonl``, which every run writes."""

    logger: tuple[Literal["console", "wandb"], ...] = ()
    """``console`` prints every new line of metrics. ``wandb`` sends them to Weights & Biases with the account and mode
    (online, offline) from wandb's environment variables; it needs the extra ``tracking``."""
    project_name: str = Field(default="cosmos_rl", min_length=1)
    """Name of the project on wandb."""
    group_name: str | None = None
    """Group of the run on wandb. Default: no group."""
    experiment_name: str | None = None
    """Name of the run on wandb. Default: the run's id."""
