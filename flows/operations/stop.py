"""End a run at work, wherever its process is."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from cosmos_rl_core.errors import StageError
from cosmos_rl_core.storage.lease import PATIENCE_S, ask_to_stop
from flows.planning.steps import read_run
from flows.running.progress import read_progress
from flows.warning.decisions import person

LOOK_S = 0.5
"""Seconds between two looks at whether the run has ended."""


@dataclass(frozen=True)
class Stopped:
    """A run on which no process works any more."""

    run: str
    pid: object
    """The process that worked on it; None if there was none."""
    host: str
    end: str
    """How the last process ended, in a word of ``status``; "" if none ever worked on the run."""

    def lines(self) -> Iterator[str]:
        """Yield the lines to print."""
        if self.pid is None:
            yield f"no process works on {self.run}"
        elif self.end == "done":
            yield f"{self.run} was about to end, and is finished"
        else:
            yield f"{self.run} is stopped: process {self.pid} on {self.host} has ended; its command continues it"


def stop(store_url: str, run_id: str, wait_s: float) -> Stopped:
    """Ask the process that works on a run to end, by its lease in the store, and wait until it has.

    It ends its stages first; what they finished is kept. A flow run of Prefect is then cancelled. Raises
    :class:`ConfigError` if there is no such run, :class:`StageError` if the process works on after ``wait_s`` seconds.
    """
    run = read_run(store_url, run_id)
    began_s, holder = time.monotonic(), run.holder(PATIENCE_S)
    if holder is None:
        said = read_progress(run.url)
        return Stopped(run_id, None, "", "" if said is None else said.end)
    ask_to_stop(run.lease_url, person())
    while run.holder(PATIENCE_S) is not None:
        if time.monotonic() - began_s > wait_s:
            raise StageError.of(
                "busy",
                f"process {holder['pid']} on {holder['host']} was asked to stop, and still works on {run_id} after "
                f"{wait_s:g} s; wait, or end it there: kill {holder['pid']}",
            )
        time.sleep(LOOK_S)
    said = read_progress(run.url)
    return Stopped(run_id, holder["pid"], str(holder["host"]), "" if said is None else said.end or "interrupted")
