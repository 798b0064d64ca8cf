"""Numbers of iterations, and of other things, as people write them."""

import re
from collections.abc import Sequence
from itertools import groupby

from cosmos_rl_core.errors import ConfigError

_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
MOST = 1_000_000
"""Most numbers of a range."""


def parsed(text: str, option: str = "--iterations") -> list[int]:
    """Return the numbers of a text such as ``3-7,9``, sorted. Raises :class:`ConfigError` for any other text."""
    found: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < first + MOST:
            raise ConfigError(f"{option} {text}: found {part.strip()!r}, expected numbers such as 3-7,9")
        found.update(range(first, last + 1))
    return sorted(found)


def ranges(numbers: Sequence[int], to: str = " to ", sep: str = ", ") -> str:
    """Return sorted numbers for people: ``0, 2 to 4``."""
    runs = [[n for _, n in some] for _, some in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return sep.join(str(run[0]) if len(run) == 1 else f"{run[0]}{to}{run[-1]}" for run in runs)
