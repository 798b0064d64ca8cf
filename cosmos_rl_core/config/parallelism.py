"""The division of a stage's work among its processes: one value, from the recipe to the process group."""

from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from cosmos_rl_core.config.base import Section
from cosmos_rl_core.errors import ConfigError

Attention = Literal["auto", "flash", "efficient", "cudnn", "math"]
"""Attention kernel: one of PyTorch's by name; ``auto`` lets PyTorch choose."""
Device = Literal["cuda", "cpu"]
"""Where the ranks of a stage compute."""


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """The division of weights and videos among ``world_size`` ranks.

    All ranks form two independent grids: ``dp_replicate_size x dp_shard_size`` for the weights and
    ``data_world_size x cp_size`` for the videos. So both sizes divide the number of ranks, but not necessarily each
    other. Raises :class:`ConfigError`, which lists every mistake.
    """

    world_size: int = 1
    dp_shard_size: int = 1
    """Number of consecutive ranks that share one copy of the weights."""
    cp_size: int = 1
    """Number of consecutive ranks that share the tokens of each video."""
    fsdp_offload: bool = False
    """Keep sharded weights in CPU memory, which saves GPU memory and costs transfers."""
    compile: bool = False
    """Compile the transformer's blocks."""

    def __post_init__(self) -> None:
        mistakes = [
            f"{name} = {size} does not divide {self.world_size} {'process' if self.world_size == 1 else 'processes'}"
            for name, size in (("dp_shard_size", self.dp_shard_size), ("cp_size", self.cp_size))
            if size < 1 or self.world_size % size
        ]
        if self.fsdp_offload and self.dp_shard_size == 1:
            mistakes.append("fsdp_offload = true needs sharded weights; set dp_shard_size above 1")
        if mistakes:
            raise ConfigError("; ".join(mistakes))

    @property
    def dp_replicate_size(self) -> int:
        """Return the number of copies of the weights."""
        return self.world_size // self.dp_shard_size

    @property
    def data_world_size(self) -> int:
        """Return the number of groups of ranks that work on different videos."""
        return self.world_size // self.cp_size


ALONE = Parallelism()
"""One process, without any sharing."""

ELASTIC_STAGES = (
    "rollout",
    "decode",
    "evaluate",
    "validate",
    "reward",
    "judge",
    "index",
    "embed",
    "encode",
    "caption",
    "describe",
)


class ElasticConfig(Section):
    """Workers that share the units of a stage. Each is one process, or one group that holds sharded weights together.

    A worker gets the next unit when it has finished one. Workers may end and join at any time: only the unfinished
    units of a lost worker are made again. Units, and so all bits, depend on samples and recipe alone.
    """

    min: int = Field(default=1, ge=1)
    """Smallest number of workers: a stage waits until this many have devices."""
    max: int = Field(ge=1)
    """Largest number of workers of a stage. Workers above ``min`` begin as soon as devices are free."""
    stages: tuple[str, ...] = ELASTIC_STAGES
    """Stages that have workers. Default: all stages of a run on diffusion models whose units are made independently."""

    @model_validator(mode="after")
    def _in_order(self) -> "ElasticConfig":
        if self.min > self.max:
            raise ValueError(f"min = {self.min} is above max = {self.max}; lower min, or raise max")
        return self
