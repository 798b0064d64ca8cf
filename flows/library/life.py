"""The process that works on a run, or how the last one ended, and how far the run came."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.lease import PATIENCE_S
from cosmos_rl_core.storage.sealed import RESTORE
from flows.devices.staying import Processes
from flows.ledger.pages import Page
from flows.planning.base import AnyRun
from flows.running.progress import Progress, read_progress
from stages.artifacts.slots import current_of

Word = Literal["running", "finished", "failed", "stopped", "suspended", "limited", "interrupted", "idle"]
"""``running``: a process works on the run. Otherwise how the last process ended; ``idle`` if there was none."""
LOOKS = 4
PAUSE_S = 0.3
"""Looks until two files agree, and seconds between them."""


@dataclass(frozen=True)
class Life:
    """The process of a run, or how the last one ended."""

    word: Word
    progress: Progress
    holder: dict[str, Any] | None
    """``pid`` and ``host`` of the process that works on the run; None without one."""

    @classmethod
    def of(cls, run: AnyRun, patience_s: float) -> "Life":
        """Look at the lease and the progress of a run.

        Waits up to ``patience_s`` for a heartbeat of a process on another machine.
        """
        # The progress is read after the lease: a process records how it ended before it releases the lease.
        holder = run.holder(patience_s)
        said = read_progress(run.url)
        if holder is not None:
            # A recorded end belongs to an earlier process.
            return cls("running", Progress() if said is None or said.end else said, holder)
        if said is None:
            return cls("idle", Progress(), None)
        # Processes that stay between stages ended with the process that recorded them.
        said = said.model_copy(update={"processes": Processes()})
        if said.end == "done" and not _is_made(run):
            # The last process made only a part, or something is to be made again.
            return cls("idle", Progress(), None)
        return cls("finished" if said.end == "done" else said.end or "interrupted", said, None)


def wave_at_work(run: AnyRun, look: Callable[[], Page | None]) -> str:
    """Return the wave that a process works on; "" if none works on the run, or between waves.

    ``look`` reads the newest page of the ledger. Page and progress are two files, which are read again until they
    agree.
    """
    wave = ""
    for _ in range(LOOKS):
        newest = look()
        life = Life.of(run, PATIENCE_S)
        wave = life.progress.wave if life.word == "running" else ""
        if life.word != "running" or newest is None or newest.state == "closed" or newest.wave == wave:
            break
        time.sleep(PAUSE_S)
    return wave


def iterations_made(run: AnyRun) -> int:
    """Return the number of iterations up to the newest policy. Raises :class:`ArtifactError` for damaged folders."""
    made = newest_first(run, "iterations")
    return next((k + 1 for k in made if current_of(run.slots.policy(k + 1))[1] is not None), 0)


def newest_first(run: AnyRun, folder: str) -> list[int]:
    """Return the numbers of the folders in ``folder``, highest first. Raises :class:`ArtifactError` if it is a file."""
    found = store.names(url := store.join(run.url, folder))
    if found == {folder}:  # the listing of a file is its own name
        raise ArtifactError(f"{url} is a file, expected a folder; {RESTORE}")
    return sorted((int(name) for name in found if name.isdecimal()), reverse=True)


def _is_made(run: AnyRun) -> bool:
    try:
        return run.is_made
    except ArtifactError:
        return False
