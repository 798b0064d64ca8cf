"""How tokens and attention heads are dealt to the peers of context parallelism: torch-free, so that a plan can tell."""

import math
from collections.abc import Mapping
from typing import Any

from cosmos_rl_core.errors import ConfigError

TRANSFORMERS = ("CosmosTransformer3DModel", "WanTransformer3DModel")
"""Classes of the transformers that :mod:`cosmos_rl_core.parallel.context_parallel` knows how to split."""


def check(transformer: Mapping[str, Any], latent_shape: tuple[int, ...] | None, num_peers: int) -> None:
    """Whether ``num_peers`` processes can share latents of ``latent_shape``, ``[C, T, H, W]``; None if not known yet.

    ``transformer`` is its ``config.json``. Raises :class:`ConfigError` for a transformer that cannot be split, and
    where a peer would be left without a token or without an attention head.
    """
    if num_peers == 1:
        return
    if (name := transformer["_class_name"]) not in TRANSFORMERS:
        raise unknown(name)
    shares("attention heads", transformer["num_attention_heads"], num_peers)
    if latent_shape is None:
        return
    grid = (side // patch for side, patch in zip(latent_shape[1:], transformer["patch_size"], strict=True))
    shares("tokens", math.prod(grid), num_peers)


def shares(what: str, count: int, num_peers: int) -> list[int]:
    """How many of ``count`` each peer takes: consecutive, the larger shares first, as equal as can be.

    10 over 4 is ``[3, 3, 2, 2]``. Raises :class:`ConfigError` if a peer would take none.
    """
    if count < num_peers:
        raise ConfigError(f"{count} {what} cannot be shared by {num_peers} context-parallel peers; at most {count}")
    least, more = divmod(count, num_peers)
    return [least + (peer < more) for peer in range(num_peers)]


def unknown(name: str) -> ConfigError:
    """What to raise for a transformer of a class that cannot be split."""
    return ConfigError(f"no context parallelism for a {name}; there is for {', '.join(TRANSFORMERS)}")
