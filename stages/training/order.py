"""The order in which supervised training goes through its items."""

from collections.abc import Mapping

import numpy as np

from cosmos_rl_core import seeds


def items_of_step(
    source: np.ndarray, weights: Mapping[str, float], batch_size: int, seed: int, step: int
) -> list[tuple[int, int]]:
    """Return (item, pass) of each sample of one optimizer step; ``source`` names the source of each item.

    Every pass over the data has its own order, which is computed by random access. With weights each source has passes
    of its own, and the source of each sample is drawn.
    """
    positions = np.arange(step * batch_size, (step + 1) * batch_size)
    if not weights:
        return _in_order(positions, np.arange(len(source)), seed)
    names = sorted(weights)
    until = np.cumsum([weights[name] for name in names])
    # The first draws of a generator do not depend on how many there are.
    draws = seeds.generator(seed, "data sources").random((step + 1) * batch_size) * until[-1]
    drawn = np.searchsorted(until, draws, side="right").clip(max=len(names) - 1)
    found: dict[int, tuple[int, int]] = {}
    for number, name in enumerate(names):
        mine = np.flatnonzero(drawn == number)
        now = mine >= positions[0]
        ordered = _in_order(np.flatnonzero(now), np.flatnonzero(source == name), seed, name)
        found |= dict(zip(mine[now].tolist(), ordered, strict=True))
    return [found[position] for position in positions.tolist()]


def _in_order(positions: np.ndarray, items: np.ndarray, seed: int, *source: str) -> list[tuple[int, int]]:
    """Return (item, pass) at positions in the passes over some items, one pass after the other."""
    size = len(items)
    orders = {p: seeds.permutation(size, seed, "data order", p, *source) for p in {*(positions // size).tolist()}}
    return [(int(items[orders[p // size][p % size]]), p // size) for p in positions.tolist()]
