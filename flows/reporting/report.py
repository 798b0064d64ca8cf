"""The page of a run on demand, whether it is at work, ended, failed or damaged."""

from contextlib import suppress

from cosmos_rl_core.errors import ArtifactError, counted
from cosmos_rl_core.storage import store
from flows.ledger.pages import Page, newest_page
from flows.library.collected import Collected
from flows.library.life import Life, wave_at_work
from flows.library.opened_run import OpenedRun
from flows.planning.base import AnyRun
from flows.reporting.writing import address, page
from flows.terminal.commands import about


def write_report(opened: OpenedRun) -> str:
    """Write the page of a run from the artifacts that it has now, and return the page's address. Changes no artifact.

    Raises :class:`ArtifactError` if stages are damaged. The page is written then too, without what they made.
    """
    url, (collected, life) = address(opened.run), _read(opened)
    store.write(url, _page(opened, collected, life))
    if names := [*collected.damaged]:
        audit = about(opened.run.store_url, "audit", opened.id)
        raise ArtifactError(
            f"{counted(len(names), 'stage')} of {opened.id} damaged: {', '.join(names)}; {url} is written without what "
            f"they made; `{audit}` lists every wrong byte"
        )
    return url


def page_now(opened: OpenedRun) -> bytes:
    """Return the page of a run as it is now."""
    return _page(opened, *_read(opened))


def _read(opened: OpenedRun) -> tuple[Collected, Life]:
    """Return the collected facts, and the run's process; collect once more if the run ended in between."""
    life = opened.life()
    collected = opened.collected()
    after = opened.life()
    return (collected, after) if after.word == life.word else (opened.collected(), after)


def _page(opened: OpenedRun, collected: Collected, life: Life) -> bytes:
    run = opened.run
    # Read last, since collecting takes seconds.
    wave = wave_at_work(run, lambda: _newest(run))
    return page(collected, life.word, life.progress.error, wave)


def _newest(run: AnyRun) -> Page | None:
    """Return the newest page of the ledger; None if it is damaged, which the page of the run says."""
    with suppress(ArtifactError):
        return newest_page(run.url)
    return None
