"""Forwards of one fixed size, so that a sample's score has the same bits alone and among any others.

The size of a batch changes the last bits of a matrix product. Here it never changes: a batch that is not full is padded
with its own items, whose results are dropped.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")


def in_batches(
    items: Sequence[Item | Exception],
    size: int,
    forward: Callable[[list[Item]], Sequence[Found]],
    shape: Callable[[Item], Hashable] = lambda item: None,
) -> list[Found | Exception]:
    """Return what ``forward`` finds for each item, in order; an exception among the items stays in its place.

    ``forward`` always gets ``size`` items whose ``shape`` is equal, and returns a value for each. Its tensors must have
    shapes that follow from ``size`` and ``shape`` alone: texts padded to a fixed length, images of a fixed size.
    """
    alike: dict[Hashable, list[tuple[int, Item]]] = {}
    found: dict[int, Found | Exception] = {}
    for i, item in enumerate(items):
        if isinstance(item, Exception):
            found[i] = item
        else:
            alike.setdefault(shape(item), []).append((i, item))
    for part in alike.values():
        for start in range(0, len(part), size):
            batch = part[start : start + size]
            given = [item for _, item in batch]
            given += [given[0]] * (size - len(given))
            values = forward(given)
            if len(values) != size:
                raise ValueError(f"the forward returned {len(values)} values for {size} items")
            found |= {i: value for (i, _), value in zip(batch, values, strict=False)}
    return [found[i] for i in range(len(items))]


def each(samples: Sequence[Item], prepare: Callable[[Item], Found]) -> list[Found | Exception]:
    """Return the result of ``prepare`` for each sample, or the ``ValueError`` that it raised."""

    def one(sample: Item) -> Found | Exception:
        try:
            return prepare(sample)
        except ValueError as error:
            return error

    return [one(sample) for sample in samples]
