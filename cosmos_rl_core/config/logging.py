"""Who is told the numbers of a run. Field names and defaults are cosmos-rl's; none changes what a run is."""

from typing import Literal

from pydantic import Field

from cosmos_rl_core.config.base import Section


class LoggingConfig(Section):
    """Who is told the numbers of a run, besides its own ``metrics.jsonl``, which is always written."""

    logger: tuple[Literal["console", "wandb"], ...] = ()
    """``console`` prints every new line of numbers. ``wandb`` sends them to Weights & Biases, by the account and in the
    mode (online, offline) that its own environment variables say; needs the extra ``tracking``."""
    project_name: str = Field(default="cosmos_rl", min_length=1)
    """Project on wandb."""
    group_name: str | None = None
    """Group on wandb that the run is shown in."""
    experiment_name: str | None = None
    """Name of the run on wandb; absent: the run's id."""
