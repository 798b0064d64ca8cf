"""Imports of large libraries, which are most of the time that a stage takes to start."""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager


def _is_of_use(record: logging.LogRecord) -> bool:
    """Return whether a warning is one that somebody can act on: torchvision is left out on purpose."""
    return "requires torchvision (not installed)" not in record.getMessage()


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch the garbage collector off inside the block.

    During imports it would go through all modules again and again and find nothing: a sixth of their time.
    """
    logging.getLogger("transformers.utils.import_utils").addFilter(_is_of_use)
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
