"""How tokens and attention heads are dealt to the peers of context parallelism: torch-free, so that a plan can tell."""

import math

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models._spec import ModelSpec, Settings
from cosmos_rl_core.pipelines import directories


def check(spec: ModelSpec, transformer: Settings, latent_shape: tuple[int, ...] | None, num_peers: int) -> None:
    """Raise :class:`ConfigError` if ``num_peers`` processes cannot share latents of ``latent_shape``, ``[C, T, H, W]``.

    ``transformer`` is the settings of the transformer. A ``latent_shape`` of None is not known yet. Found are
    transformers that cannot be split, and peers that would be left without a token or an attention head.
    """
    if num_peers == 1:
        return
    if not spec.context_parallel:
        known = sorted(s.transformer_class for s in directories.specs() if s.context_parallel)
        raise ConfigError(f"no context parallelism for a {spec.transformer_class}; there is for {', '.join(known)}")
    shares("attention heads", transformer["num_attention_heads"], num_peers)
    if latent_shape is None:
        return
    grid = (side // patch for side, patch in zip(latent_shape[1:], spec.patch(transformer), strict=True))
    shares("tokens", math.prod(grid), num_peers)


def shares(what: str, count: int, num_peers: int) -> list[int]:
    """How many of ``count`` each peer takes: consecutive, the larger shares first, as equal as can be.

    10 over 4 is ``[3, 3, 2, 2]``. Raises :class:`ConfigError` if a peer would take none.
    """
    if count < num_peers:
        raise ConfigError(f"{count} {what} cannot be shared by {num_peers} context-parallel peers; at most {count}")
    least, more = divmod(count, num_peers)
    return [least + (peer < more) for peer in range(num_peers)]
