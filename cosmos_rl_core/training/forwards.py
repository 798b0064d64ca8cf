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
    """Return how many samples, and how many noise levels of each, go into one forward pass.

    Samples are trained at ``num_times`` noise levels each. ``num_tokens`` returns the number of tokens of a sample's
    latents. ``shrunk`` lowers a number of rows that did not fit into memory. A pass takes all levels of a sample before
    a second sample, because they share its conditioning. ``members`` samples are a unit, which is never divided, so the
    number of samples is a multiple of it.
    """
    if options.tokens_per_forward is None:
        return Filling(shrunk(max(1, options.mini_batch // members)) * members)
    rows = shrunk(max(1, options.tokens_per_forward // (num_tokens() * members)))
    levels = min(rows, num_times)
    return Filling(rows // levels * members, levels)
