"""The wave that a process works on now, by which attempts that are at work are told from those that a kill cut off."""

import time
from collections.abc import Callable

from cosmos_rl_core.storage.lease import PATIENCE_S
from flows.ledger.pages import Page
from flows.planning.run import Run
from flows.watching.status import life_of

LOOKS = 4
PAUSE_S = 0.3


def wave_at_work(run: Run, look: Callable[[], Page | None]) -> str:
    """Return the wave that a process works on; "" if none works on the run, or between waves.

    ``look`` reads the newest page of the ledger. It and the progress are two files: they are read again until they
    agree.
    """
    wave = ""
    for _ in range(LOOKS):
        newest = look()
        life, progress, _ = life_of(run, PATIENCE_S)
        wave = progress.wave if life == "running" else ""
        if life != "running" or newest is None or newest.state == "closed" or newest.wave == wave:
            break
        time.sleep(PAUSE_S)
    return wave
