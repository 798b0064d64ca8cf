"""Shares of tokens and attention heads in context parallelism. Imports no torch, so that plans can check them."""

import math

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.pipelines.spec import ModelSpec, Settings


def check(spec: ModelSpec, transformer: Settings, latent_shape: tuple[int, ...], num_peers: int) -> None:
    """Raise :class:`ConfigError` if ``num_peers`` processes cannot share latents of ``latent_shape``, ``[C, T, H, W]``.

    They cannot if the model does not support it, or if a peer would get no token or no attention head. ``transformer``
    has the settings of the transformer.
    """
    if not spec.context_parallel:
        known = sorted(s.transformer_class for s in directories.specs() if s.context_parallel)
        raise ConfigError(f"no context parallelism for {spec.transformer_class}; supported: {', '.join(known)}")
    shares("attention heads", transformer["num_attention_heads"], num_peers)
    grid = (side // patch for side, patch in zip(latent_shape[1:], spec.patch(transformer), strict=True))
    shares("tokens", math.prod(grid), num_peers)


def shares(what: str, count: int, num_peers: int) -> list[int]:
    """Return the number of consecutive items for each peer, which differ by at most one, larger shares first.

    10 over 4 gives ``[3, 3, 2, 2]``. Raises :class:`ConfigError` if a peer would get none.
    """
    if count < num_peers:
        raise ConfigError(f"{count} {what} cannot be shared by {num_peers} context-parallel peers; at most {count}")
    least, more = divmod(count, num_peers)
    return [least + (peer < more) for peer in range(num_peers)]
