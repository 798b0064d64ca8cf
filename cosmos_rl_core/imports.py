"""Imports of large libraries, which are most of the time that a stage takes to start."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch the garbage collector off inside the block.

    During imports it would go through all modules again and again and find nothing: a sixth of their time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
