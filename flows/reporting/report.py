"""The page of a run on demand, whatever became of it."""

from contextlib import suppress

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.lease import PATIENCE_S
from flows.ledger.pages import Page, newest_page
from flows.planning.run import Run
from flows.planning.steps import open_run
from flows.reporting.collecting import Collected
from flows.reporting.writing import address, page
from flows.watching.status import life_of, wave_at_work


def write_report(store_url: str, run_id: str) -> str:
    """Write the page of a run from what stands, and return its address. Changes no artifact.

    Raises :class:`ConfigError` if there is no such run.
    """
    run = open_run(store_url, run_id)
    life, progress, _ = life_of(run, PATIENCE_S)
    collected = Collected(run)
    collected.fill()
    # Read last, since filling takes seconds.
    wave = wave_at_work(run, lambda: _newest(run))
    state = "finished" if life == "done" else life
    store.write(address(run), page(collected, state, progress.error, wave))
    return address(run)


def _newest(run: Run) -> Page | None:
    """Return the newest page of the ledger; None if it is damaged, which the page of the run says."""
    with suppress(ArtifactError):
        return newest_page(run.url)
    return None
