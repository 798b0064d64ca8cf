"""The page of a run on demand, whatever became of it."""

from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.lease import PATIENCE_S
from flows.planning.steps import open_run
from flows.reporting.collecting import Collected
from flows.reporting.writing import address, page
from flows.watching.status import life_of


def write_report(store_url: str, run_id: str) -> str:
    """Write the page of a run from what stands, and return its address. Changes no artifact.

    Raises :class:`ConfigError` if there is no such run.
    """
    run = open_run(store_url, run_id)
    life, progress, _ = life_of(run, PATIENCE_S)
    collected = Collected(run)
    collected.fill()
    state = "finished" if life == "done" else life
    store.write(address(run), page(collected, state, progress.error, progress.wave if life == "running" else ""))
    return address(run)
