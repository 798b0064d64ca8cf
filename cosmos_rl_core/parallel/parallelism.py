"""How the processes of one stage share its work: one value, from the recipe to the process group."""

from dataclasses import dataclass

from cosmos_rl_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Who shares what among ``world_size`` ranks, and how each computes its part.

    Ranks are cut twice, each time by all of them: ``dp_replicate_size x dp_shard_size`` for the weights, and
    ``data_world_size x cp_size`` for the videos. So the two sizes divide the ranks, but need not divide each other.
    Raises :class:`ConfigError` with everything that does not fit.
    """

    world_size: int = 1
    dp_shard_size: int = 1
    """Consecutive ranks that share one copy of the weights."""
    cp_size: int = 1
    """Consecutive ranks that share the tokens of each video."""
    fsdp_offload: bool = False
    """Whether shared weights rest in the CPU's memory."""
    compile: bool = False
    """Whether the transformer's blocks are compiled."""

    def __post_init__(self) -> None:
        mistakes = [
            f"{name} = {size} does not divide {self.world_size} {'process' if self.world_size == 1 else 'processes'}"
            for name, size in (("dp_shard_size", self.dp_shard_size), ("cp_size", self.cp_size))
            if size < 1 or self.world_size % size
        ]
        if self.fsdp_offload and self.dp_shard_size == 1:
            mistakes.append("fsdp_offload = true is for weights that ranks share; set dp_shard_size above 1")
        if mistakes:
            raise ConfigError("; ".join(mistakes))

    @property
    def dp_replicate_size(self) -> int:
        """Copies of the weights."""
        return self.world_size // self.dp_shard_size

    @property
    def data_world_size(self) -> int:
        """Groups of ranks that are dealt work of their own."""
        return self.world_size // self.cp_size


ALONE = Parallelism()
"""One process, as it is."""
