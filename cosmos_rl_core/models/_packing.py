"""Packing of latents into tokens, for transformers whose tokens are squares of 2 x 2 latents."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

SIDE = 2
"""Latents along a side of the square that one token holds."""


def pack(latents: Tensor) -> Tensor:
    """Return tokens ``[B, H/2 W/2, 4 C]`` of latents ``[B, C, H, W]``, row by row."""
    squares = latents.unflatten(3, (-1, SIDE)).unflatten(2, (-1, SIDE))
    return squares.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Return latents ``[B, C, height, width]`` of tokens ``[B, S, 4 C]``; the inverse of :func:`pack`."""
    rows = tokens.unflatten(1, (height // SIDE, width // SIDE)).unflatten(3, (-1, SIDE, SIDE))
    return rows.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


@contextmanager
def exact_time(embedder: nn.Module, timesteps: Tensor) -> Iterator[None]:
    """Give the embedder ``timesteps`` as its first argument, within the context.

    Without it, transformers of packed tokens round the timestep to the type of their hidden states, which is a half
    type under autocast.
    """
    hook = embedder.register_forward_pre_hook(lambda _, given: (timesteps, *given[1:]))
    try:
        yield
    finally:
        hook.remove()
