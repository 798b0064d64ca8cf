"""The order in which training takes samples of rollouts, or items of media."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain, groupby, pairwise
from types import MappingProxyType

import numpy as np

from cosmos_rl_core import seeds
from stages.artifacts.layouts import evenly
from stages.formats.samples import place_of

Unit = tuple[str, ...]
"""Keys of samples that are trained together: one sample, or the winner and the loser of a pair."""


def steps_of(
    units: Sequence[Unit],
    *,
    passes: int,
    per_pass: int,
    mini_batch: int,
    num_shares: int,
    seed: int,
    iteration: int,
    kinds: Mapping[str, int] = MappingProxyType({}),
) -> list[list[list[str]]]:
    """Return optimizer steps on rollouts: lists of micro-batches of sample keys. No step and no batch divides a unit.

    Each of ``passes`` has ``per_pass`` steps, and needs at least as many units. A micro-batch holds at most
    ``mini_batch`` samples, of one rollout and of one kind, if ``kinds`` gives the keys' kinds. If there are enough
    units, the number of micro-batches is a multiple of ``num_shares``, the ranks that share them.
    """
    at_once = mini_batch // len(units[0])
    steps: list[list[list[str]]] = []
    for epoch in range(passes):
        order = [units[i] for i in seeds.permutation(len(units), seed, "update order", iteration, epoch)]
        for start, end in pairwise(len(order) * k // per_pass for k in range(per_pass + 1)):

            def alike(unit: Unit) -> tuple[int, int]:
                return _rollout_of(unit), kinds.get(unit[0], 0)

            in_rollouts = sorted(order[start:end], key=alike)
            steps.append([])
            for part in (list(part) for _, part in groupby(in_rollouts, alike)):
                rounds = math.ceil(len(part) / (at_once * num_shares))
                batches = evenly(part, min(len(part), rounds * num_shares))
                steps[-1] += [[*chain.from_iterable(batch)] for batch in batches]
    return steps


def _rollout_of(unit: Unit) -> int:
    return place_of(unit[0])[0]


def items_of_step(
    source: np.ndarray, weights: Mapping[str, float], batch_size: int, seed: int, step: int
) -> list[tuple[int, int]]:
    """Return (item, pass) of each sample of one optimizer step; ``source`` names the source of each item.

    Every pass over the data has its own order, which is computed by random access. With ``weights``, the source of each
    sample is drawn, and each source has passes of its own.
    """
    positions = np.arange(step * batch_size, (step + 1) * batch_size)
    if not weights:
        return _in_order(positions, np.arange(len(source)), seed)
    names = sorted(weights)
    until = np.cumsum([weights[name] for name in names])
    # The first draws of a generator do not depend on how many are drawn.
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
    """Return (item, pass) at each of the positions in consecutive passes over ``items``."""
    size = len(items)
    orders = {p: seeds.permutation(size, seed, "data order", p, *source) for p in {*(positions // size).tolist()}}
    return [(int(items[orders[p // size][p % size]]), p // size) for p in positions.tolist()]
