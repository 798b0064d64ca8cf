"""Names of the parts of a policy and of the weights that a loss compares, and their files. Imports no torch."""

from collections.abc import Mapping
from typing import Literal

CURRENT = "current"
"""The trained weights."""
OLD = "old"
"""NFT's slow copy of ``current``."""
EMA = "ema"
"""The exponential moving average of ``current``."""
REFERENCE = "reference"
"""The weights that a KL term compares with ``current``: the base model's, unless the algorithm refreshes them."""
INIT = "init"
"""The adapter that lies frozen below ``current``; version 0 alone has this part."""
OPTIMIZER = "optimizer"
"""The moments and step counts of the optimizer."""
SCHEDULE = "schedule"
"""The numbers of finished iterations and optimizer steps."""
BEHAVIOUR = "behaviour"
"""The weights that generated the rollouts. Not stored as a part: it is ``current``, ``old`` or ``ema`` of a policy."""

OWN = "own"
"""The run's own copy, read in place of ``behaviour`` where another policy made the rollouts."""
Anchor = Literal["own", "behaviour"]
"""Weights that a loss reads as ``behaviour`` on rollouts of another run."""

STATE = (CURRENT, OLD, EMA, REFERENCE, OPTIMIZER, SCHEDULE)
"""The parts that training reads and writes."""
TRAINING_ONLY = (OLD, REFERENCE, OPTIMIZER)
"""The parts that only training reads; ``current`` and ``ema`` can be exported, ``schedule`` has the clocks."""

MAX_FILE_BYTES = 2**30
"""Largest sum of a file's tensors, in bytes; a larger tensor has a file of its own."""


def cut(sizes: Mapping[str, int], max_bytes: int = MAX_FILE_BYTES) -> list[list[str]]:
    """Divide tensors, given by their bytes, into files of at most ``max_bytes``, in the order of their names.

    Returns the names in each file. The result depends only on names and sizes.
    """
    files: list[list[str]] = []
    room = 0
    for name in sorted(sizes):
        if not files or sizes[name] > room:
            files.append([])
            room = max_bytes
        files[-1].append(name)
        room -= sizes[name]
    return files
