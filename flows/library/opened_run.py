"""The reader of a run. Commands, pages and notebooks read runs through it, at work, failed or finished."""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cosmos_rl_core.config.clusters import PricesConfig
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage.lease import PATIENCE_S
from flows.defaults import store_of
from flows.ledger.costs import RunCost, cost_of
from flows.ledger.pages import LEDGER, Page, marked, pages
from flows.library.life import Life, wave_at_work
from flows.library.overview import Overview
from flows.library.policy import Policy
from flows.planning import steps
from flows.planning.base import AnyRun
from flows.planning.steps import Step
from flows.post_train import steps as steps_of
from stages.artifacts.slots import one_look

if TYPE_CHECKING:
    import pandas as pd

    from flows.library.collected import Collected


def open_run(run: str, store: str | None = None) -> "OpenedRun":
    """Open a run to read it: by its id, or by its URL, which the flow prints (``s3://bucket/prefix/runs/RUN``).

    Without ``store``, an id is looked up in the store that ``COSMOS_FLOWS_STORE`` names, else in ``outputs``.
    Raises :class:`ConfigError` if there is no such run, :class:`ArtifactError` if its plan is damaged.
    """
    parent, _, name = run.rstrip("/").rpartition("/")
    if parent == "runs" or parent.endswith("/runs"):
        root = parent.removesuffix("runs")
        return OpenedRun(steps.read_run(root.rstrip("/") or root or ".", name))
    return OpenedRun(steps.read_run(store_of(store), run))


@dataclass(frozen=True)
class OpenedRun:
    """A run of a store. Each call reads what the run has now. Nothing is changed, and torch is not imported."""

    run: AnyRun
    """Its plan, and where its artifacts go."""

    def __repr__(self) -> str:
        return f"OpenedRun({self.url})"

    @property
    def id(self) -> str:
        """Return the run's id."""
        return self.run.plan.run_id

    @property
    def url(self) -> str:
        """Return the root of the run."""
        return self.run.url

    @property
    def rewards(self) -> tuple[str, ...]:
        """Return the labels of the rewards that score rollouts, the monitored statistics among them."""
        return tuple(reward.fn.label for reward in self.run.scored)

    @property
    def steps(self) -> list[Step]:
        """Return every stage of the run in order, with evaluations at the ends of shorter runs that it went on from."""
        return steps_of(self.run)

    def settings(self) -> dict[str, Any]:
        """Return the settings of the recipe, without the machine's."""
        return self.run.recipe.identity()

    def life(self, patience_s: float = PATIENCE_S) -> Life:
        """Return whether a process works on the run, or how the last one ended.

        Waits up to ``patience_s`` for a heartbeat of a process on another machine.
        """
        return Life.of(self.run, patience_s)

    def now(self) -> Overview:
        """Return the run at this moment: each stage, the process, rewards, time left, warnings, the best policy."""
        return Overview.of(self.run)

    def collected(self) -> "Collected":
        """Return the facts that a report shows, from the artifacts, logs and attempts that there are now."""
        # Imported here because it needs pandas, and a status does not.
        collected = import_module("flows.library.collected")
        with one_look():
            now = self.now()
            found: Collected = collected.Collected(now.run)
            found.fill(now.states)
        return found

    def cost(self, prices: PricesConfig | None = None) -> RunCost:
        """Return the cost of the run until now: seconds, device seconds, bytes, and money where prices are known.

        Prices are the given ones, else the plan's.
        Raises :class:`ConfigError` if it has no ledger, :class:`ArtifactError` if that is damaged.
        """
        found: list[Page] = []

        def look() -> Page | None:
            found[:] = pages(self.url)
            return found[-1] if found else None

        wave = wave_at_work(self.run, look)
        if not found:
            raise ConfigError(
                f"no stage of {self.id} has started, or all before ledgers existed: {self.url}/{LEDGER} has no pages"
            )
        return cost_of(self.run, marked(found, wave), prices or self.run.recipe.launch.prices)

    def metrics(self) -> "pd.DataFrame":
        """Return ``metrics.jsonl`` as a table, a row for each optimizer step or artifact; empty before any update."""
        return _tables().metrics(self.run)

    def stages(self) -> "pd.DataFrame":
        """Return one row for each stage, in order: ``name``, ``stage``, ``k``, ``state``, ``attempts``, ``seconds``,
        ``reward``, ``loss``, ``why`` and ``slot``, as in ``cosmos-flows status --json``.
        """
        return _tables().stages(self.run)

    def samples(self, iteration: int) -> "pd.DataFrame":
        """Return the samples of a rollout in the order of generation, with their scores and advantages.

        Columns: ``sample_id``, ``prompt_id``, ``prompt``, ``seed`` and the other facts of the index; for each reward
        a column with its name, NaN where it has no score, and ``<name>.error``; ``reward``, ``advantage`` and ``used``
        once the update has finished, and ``beats`` where it trains on pairs; ``references``, the digests of what a
        prompt refers to, where prompts do; ``picture``, read when looked at, None for a sample that is not finite.
        Raises :class:`ConfigError` if the run has no such rollout, :class:`ArtifactError` if a file is damaged.
        """
        return _tables().samples(self.run, iteration)

    def held_out(self, policy_version: int) -> "pd.DataFrame":
        """Return the held-out samples of a policy version, like :meth:`samples` but without advantages."""
        return _tables().held_out(self.run, policy_version)

    def policy(self, version: int) -> Policy:
        """Return a policy version; 0 is the one that the run began with.

        Raises :class:`ConfigError` if there is no such version yet.
        """
        return Policy.of(self.run, version)


def _tables() -> Any:
    """Return the functions that read tables. Imported on use because pandas takes half a second."""
    return import_module("flows.library.tables")
