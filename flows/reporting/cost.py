"""The cost of a run until now."""

from cosmos_rl_core.config.clusters import PricesConfig
from cosmos_rl_core.errors import ConfigError
from flows.ledger.costs import RunCost, cost_of
from flows.ledger.pages import LEDGER, Page, marked, pages
from flows.planning.plan import read_plan
from flows.planning.run import run_of
from flows.watching.status import wave_at_work


def cost(store_url: str, run_id: str, prices: PricesConfig | None = None) -> RunCost:
    """Return the cost of a run, with the prices given, else those of its plan, else none.

    Raises :class:`ConfigError` if there is no such run or it has no ledger, :class:`ArtifactError` if that is damaged.
    """
    run = run_of(read_plan(store_url, run_id), store_url)
    found: list[Page] = []

    def look() -> Page | None:
        found[:] = pages(run.url)
        return found[-1] if found else None

    wave = wave_at_work(run, look)
    if not found:
        raise ConfigError(
            f"no stage of {run_id} was started yet, or before runs had a ledger: {run.url}/{LEDGER} has no pages"
        )
    return cost_of(run, marked(found, wave), prices or run.recipe.launch.prices)
