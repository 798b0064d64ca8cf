"""The order in which training takes samples of rollouts, or items of media."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain, groupby, pairwise
from types import MappingProxyType
from typing import Any

import numpy as np

from cosmos_rl_core import seeds
from cosmos_rl_core.errors import DatasetError
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


_DRAWS = 2**16
"""Draws of sources that are made at once, a multiple of :data:`_DRAWS_OF_A_COUNT`."""
_DRAWS_OF_A_COUNT = 4
"""Numbers that Philox makes of one value of its counter."""


class ItemOrder:
    """The items that optimizer steps of supervised training take. Any step may be asked for, by random access.

    Every pass over the data has its own order. With weights, the source of each sample is drawn, and each source has
    passes of its own.
    """

    def __init__(self, source: np.ndarray, weights: Mapping[str, float], batch_size: int, seed: int) -> None:
        """Set up. ``source`` names the source of each item. Raises :class:`DatasetError` for a weight without items."""
        self._batch_size, self._seed, names = batch_size, seed, sorted(weights)
        self._passes = [_Passes(np.flatnonzero(source == name), seed, name) for name in names]
        if empty := [name for name, passes in zip(names, self._passes, strict=True) if not passes.size]:
            raise DatasetError(
                f"no item of {', '.join(empty)} is left to train on, and weights draw from there; mend its items, or "
                "plan another run without it"
            )
        self._passes = self._passes or [_Passes(np.arange(len(source)), seed)]
        self._until = np.cumsum([weights[name] for name in names])
        self._before = [np.zeros(len(names), np.int64)]
        """Numbers of draws of each source before each block of draws, as far as they were needed."""

    def of_step(self, step: int) -> list[tuple[int, int]]:
        """Return (item, pass) of each sample of one optimizer step."""
        first, end = step * self._batch_size, (step + 1) * self._batch_size
        if not len(self._until):
            return self._passes[0].at(np.arange(first, end))
        block, offset = divmod(first, _DRAWS)
        blocks = range(block, -(-end // _DRAWS))
        drawn = np.concatenate([self._drawn(number) for number in blocks])
        before = self._before_block(block) + self._counts(drawn[:offset])
        drawn = drawn[offset : offset + self._batch_size]
        found: list[tuple[int, int]] = [(0, 0)] * self._batch_size
        for number, passes in enumerate(self._passes):
            mine = np.flatnonzero(drawn == number)
            for place, item in zip(mine.tolist(), passes.at(before[number] + np.arange(len(mine))), strict=True):
                found[place] = item
        return found

    def _before_block(self, block: int) -> np.ndarray:
        while len(self._before) <= block:
            self._before.append(self._before[-1] + self._counts(self._drawn(len(self._before) - 1)))
        return self._before[block]

    def _counts(self, drawn: np.ndarray) -> np.ndarray:
        return np.bincount(drawn, minlength=len(self._passes))

    def _drawn(self, block: int) -> np.ndarray:
        """Return the numbers of the sources of one block of draws."""
        generator: Any = seeds.generator(self._seed, "data sources")
        generator.bit_generator.advance(block * (_DRAWS // _DRAWS_OF_A_COUNT))
        draws = generator.random(_DRAWS) * self._until[-1]
        return np.searchsorted(self._until, draws, side="right").clip(max=len(self._until) - 1)


class _Passes:
    """Consecutive passes over some items, each in an order of its own."""

    def __init__(self, items: np.ndarray, seed: int, *source: str) -> None:
        self._items, self._seed, self._source = items, seed, source
        self._orders: dict[int, np.ndarray] = {}
        """The items in the order of the latest passes that were asked for."""

    @property
    def size(self) -> int:
        """Return the number of items of a pass."""
        return len(self._items)

    def at(self, positions: np.ndarray) -> list[tuple[int, int]]:
        """Return (item, pass) at each of the positions."""
        places = [divmod(position, self.size) for position in positions.tolist()]
        self._orders = {p: self._orders[p] if p in self._orders else self._order(p) for p in {p for p, _ in places}}
        return [(int(self._orders[p][place]), p) for p, place in places]

    def _order(self, number: int) -> np.ndarray:
        return self._items[seeds.permutation(self.size, self._seed, "data order", number, *self._source)]
