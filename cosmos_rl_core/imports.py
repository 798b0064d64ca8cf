"""Imports of large libraries, which are most of the time that a stage takes to start."""

import gc
import logging
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


WARNS = "transformers.utils.import_utils"
"""Name of the logger by which transformers says what it does without torchvision."""


def without_torchvision_warnings() -> None:
    """Leave the warnings that torchvision is not installed out of the log of this process, to its end.

    Nobody can act on them: torchvision is left out on purpose.
    """
    logging.getLogger(WARNS).addFilter(_is_of_use)


def _is_of_use(record: logging.LogRecord) -> bool:
    return "requires torchvision (not installed)" not in record.getMessage()
