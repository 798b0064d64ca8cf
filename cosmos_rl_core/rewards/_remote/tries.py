"""Tries of a request to a reward service, and the pauses between them."""

import threading
import time
from collections.abc import Iterator

from cosmos_rl_core.errors import UnavailableError
from cosmos_rl_core.processes import TRAFFIC

RETRY_DELAYS_S, POLL_DELAYS_S = (0.5, 30.0), (0.05, 5.0)
"""First and longest pause before a failed request is repeated, and before the next poll for scores."""


def tries(deadline_s: float, pauses_s: tuple[float, float], ended: threading.Event | None = None) -> Iterator[None]:
    """Yield once per try, with growing pauses between, while the next try begins before the deadline.

    Raises :class:`UnavailableError` in place of another try once ``ended`` is set.
    """
    pause_s, longest_s = pauses_s
    ended = threading.Event() if ended is None else ended
    yield
    while time.monotonic() + pause_s <= deadline_s:
        with TRAFFIC.waiting():
            if ended.wait(pause_s):
                raise UnavailableError("another request ended the scoring")
        pause_s = min(1.5 * pause_s, longest_s)
        yield
