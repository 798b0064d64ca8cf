"""The page of a run on demand, whatever became of it."""

from contextlib import suppress

from cosmos_rl_core.errors import ArtifactError, counted
from cosmos_rl_core.storage import store
from flows.ledger.pages import Page, newest_page
from flows.library.collected import Collected
from flows.library.life import wave_at_work
from flows.library.opened_run import OpenedRun
from flows.planning.base import AnyRun
from flows.reporting.writing import address, page
from flows.terminal.commands import about


def write_report(opened: OpenedRun) -> str:
    """Write the page of a run from what there is, and return its address. Changes no artifact.

    Raises :class:`ArtifactError` if stages are damaged. The page is written then too, without what they made.
    """
    url, collected = address(opened.run), opened.collected()
    store.write(url, _page(opened, collected))
    if names := [name for name, _ in collected.damaged]:
        audit = about(opened.run.store_url, "audit", opened.id)
        raise ArtifactError(
            f"{counted(len(names), 'stage')} of {opened.id} damaged: {', '.join(names)}; {url} is written without what "
            f"they made; `{audit}` lists every wrong byte"
        )
    return url


def page_now(opened: OpenedRun) -> bytes:
    """Return the page of a run as it is now."""
    return _page(opened, opened.collected())


def _page(opened: OpenedRun, collected: Collected) -> bytes:
    run, life = opened.run, opened.life()
    # Read last, since collecting takes seconds.
    wave = wave_at_work(run, lambda: _newest(run))
    return page(collected, "finished" if life.word == "done" else life.word, life.progress.error, wave)


def _newest(run: AnyRun) -> Page | None:
    """Return the newest page of the ledger; None if it is damaged, which the page of the run says."""
    with suppress(ArtifactError):
        return newest_page(run.url)
    return None
