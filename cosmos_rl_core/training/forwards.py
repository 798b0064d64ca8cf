"""Samples of a forward pass of an update, and noise levels of each: without torch, so that plans can use it."""

from collections.abc import Callable
from typing import NamedTuple

from cosmos_rl_core.config.train import RewardedOptions


class Filling(NamedTuple):
    """Largest number of samples of a forward and backward pass, and of the noise levels of each."""

    samples: int
    levels: int = 1


def filling(
    options: RewardedOptions,
    num_times: int,
    num_tokens: Callable[[], int],
    shrunk: Callable[[int], int] = lambda size: size,
    members: int = 1,
) -> Filling:
    """Return what fills a forward pass of samples that are trained at ``num_times`` noise levels each.

    ``num_tokens`` returns the tokens of a sample's latents. ``shrunk`` lowers a number of rows that did not fit into
    memory. All levels of a sample come before a second sample, because they share its conditioning. So many ``members``
    are a unit, which is never divided: there is at least one unit.
    """
    if options.tokens_per_forward is None:
        return Filling(shrunk(max(1, options.mini_batch // members)) * members)
    rows = shrunk(max(1, options.tokens_per_forward // (num_tokens() * members)))
    levels = min(rows, num_times)
    return Filling(rows // levels * members, levels)
