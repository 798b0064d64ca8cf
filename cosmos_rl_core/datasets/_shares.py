"""The share of each set of a mixture in the prompts of an iteration."""

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from cosmos_rl_core import seeds
from cosmos_rl_core.config.base import Section

_UNIT = 2**32
"""Steps from one prompt to the next on the line of an iteration's prompts: counts are exact in integers."""


class Share(Section):
    """One set of a mixture: a number of consecutive prompts of a plan, and their weight."""

    weight: float
    """Share of an iteration's prompts, relative to the other sets' shares."""
    num_prompts: int


@lru_cache(maxsize=8)
def order_of(count: int, *key: seeds.Key) -> np.ndarray:
    """Return the permutation of ``range(count)`` for a key, like :func:`.seeds.permutation`.

    Kept, because whoever looks at a run asks for the prompts of each iteration, and a pass over a million prompts takes
    thousands of iterations.
    """
    order = np.array(seeds.permutation(count, *key), np.int64)
    order.flags.writeable = False
    return order


def most(shares: Sequence[Share], wanted: int) -> list[int]:
    """Return the largest number of prompts that an iteration of ``wanted`` prompts takes from each set."""
    return [math.ceil((end - begin) / _UNIT) for begin, end in itertools.pairwise(_line(shares, wanted))]


def chosen(shares: Sequence[Share], wanted: int, seed: int, k: int) -> list[int]:
    """Return the indices of the ``wanted`` prompts of iteration k, all different.

    The number of prompts from each set is drawn by systematic sampling: it is the set's share rounded up or down, and
    its mean is the share. Each pass over a set has its own order. A pass ends when it has too few prompts left for an
    iteration.
    """
    line, first, found = _line(shares, wanted), 0, list[int]()
    # The first draws of a generator do not depend on how many there are.
    offsets = (seeds.generator(seed, "prompt shares").random(k + 1) * _UNIT).astype(np.int64)
    for number, (share, (begin, end)) in enumerate(zip(shares, itertools.pairwise(line), strict=True)):
        counts = _points_below(end, offsets) - _points_below(begin, offsets)
        epoch, places = _last(counts.tolist(), share.num_prompts)
        order = order_of(share.num_prompts, seed, "prompt order", epoch, number)
        found += (first + order[places.start : places.stop]).tolist()
        first += share.num_prompts
    return found


def _line(shares: Sequence[Share], wanted: int) -> list[int]:
    """Return where each set begins on a line of ``wanted`` prompts, each as long as its share, and the line's end."""
    total = math.fsum(share.weight for share in shares)
    begins = itertools.accumulate((share.weight for share in shares[:-1]), initial=0.0)
    return [*(round(begin / total * wanted * _UNIT) for begin in begins), wanted * _UNIT]


def _points_below(end: int, offsets: np.ndarray) -> np.ndarray:
    """Return how many of the points ``offset``, ``offset + 1 prompt``, ... lie before ``end``, for each offset."""
    return -((offsets - end) // _UNIT)


def _last(counts: list[int], size: int) -> tuple[int, range]:
    """Return, for the last of consecutive draws from a set of ``size``, its pass and its places in the pass's order."""
    epoch, start = 0, 0
    for count in counts[:-1]:
        epoch, start = _begin(epoch, start, count, size)
        start += count
    epoch, start = _begin(epoch, start, counts[-1], size)
    return epoch, range(start, start + counts[-1])


def _begin(epoch: int, start: int, count: int, size: int) -> tuple[int, int]:
    return (epoch + 1, 0) if start + count > size else (epoch, start)
