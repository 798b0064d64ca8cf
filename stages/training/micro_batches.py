"""Micro-batches: their division among ranks, and threads that make them in the background."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import chain, islice, tee
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.storage import store


class Tensors(Protocol):
    """Tensors that are copied to the device together."""

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the same object with ``change`` applied to each tensor."""
        ...


Micro = TypeVar("Micro", bound=Tensors)


def my_share(items: list[list[Callable[[float], Micro]]], group: Group) -> list[Callable[[], Micro]]:
    """Return the functions that make the micro-batches of this rank's items, every ``data_world_size``-th one.

    The micro-batches of an item are noise levels of the same samples, so each rank reads only its own samples. Ranks
    with fewer items repeat one item with weight 0, so that all ranks do the same number of passes.
    """
    share: list[Callable[[], Micro]] = []
    for first in range(0, len(items), group.data_world_size):
        index = first + group.data_rank
        weight = 1.0 if index < len(items) else 0.0
        share += [partial(make, weight) for make in items[index if weight else first]]
    return share


@contextmanager
def made_ahead(
    shares: Iterable[list[Callable[[], Micro]]], device: torch.device
) -> Iterator[Iterator[Iterator[Micro]]]:
    """Yield the micro-batches of each optimizer step, made in the background while earlier ones compute.

    For a GPU they are in pinned memory, from which it copies them while the host goes on. Memory holds a few of them
    (:func:`cosmos_rl_core.storage.store.ahead`). An error in making a micro-batch is raised when its turn comes. The
    threads end with the context.
    """
    shares, again = tee(shares)

    def made_for(make: Callable[[], Micro]) -> Micro:
        return make() if device.type != "cuda" else make().each(partial(_pinned, device=device))

    with closing(store.ahead(chain.from_iterable(shares), made_for)) as made:
        yield ((micro for _, micro in islice(made, len(share))) for share in again)


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    # A new thread uses the first GPU by default, and then every rank would take memory there.
    with torch.cuda.device(device):
        return tensor.pin_memory()
