"""The page of a run on demand, whatever became of it."""

from contextlib import suppress

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import store
from flows.ledger.pages import Page, newest_page
from flows.library.life import wave_at_work
from flows.library.opened_run import OpenedRun
from flows.planning.base import AnyRun
from flows.reporting.writing import address, page


def write_report(opened: OpenedRun) -> str:
    """Write the page of a run from what there is, and return its address. Changes no artifact."""
    url, data = address(opened.run), page_now(opened)
    store.write(url, data)
    return url


def page_now(opened: OpenedRun) -> bytes:
    """Return the page of a run as it is now."""
    run, life = opened.run, opened.life()
    collected = opened.collected()
    # Read last, since collecting takes seconds.
    wave = wave_at_work(run, lambda: _newest(run))
    return page(collected, "finished" if life.word == "done" else life.word, life.progress.error, wave)


def _newest(run: AnyRun) -> Page | None:
    """Return the newest page of the ledger; None if it is damaged, which the page of the run says."""
    with suppress(ArtifactError):
        return newest_page(run.url)
    return None
