"""A run, opened to read its samples, numbers, stages and policies."""

import io
from dataclasses import dataclass
from typing import Any

import pandas as pd

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage import store as stores
from flows.defaults import store_of
from flows.library.picture import Picture
from flows.library.policy import Policy
from flows.planning import steps
from flows.planning.run import Run
from flows.terminal.commands import about
from flows.watching.metrics import FILE
from flows.watching.status import states
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of, standing
from stages.formats.members import Members
from stages.formats.samples import read_index
from stages.formats.tables import read_table


def open_run(run: str, store: str | None = None) -> "OpenedRun":
    """Open a run to read it: by its id, or by its URL, which the flow prints (``s3://bucket/prefix/runs/RUN``).

    Without ``store``, an id is looked up in the store that ``COSMOS_FLOWS_STORE`` names, else in ``outputs``.
    Raises :class:`ConfigError` if there is no such run, :class:`ArtifactError` if its plan is damaged.
    """
    return OpenedRun(run_at(run, store_of(store)))


def run_at(run: str, store: str) -> Run:
    """Return the run with an id or a URL, like :func:`open_run`, for code that walks its stages."""
    parent, _, name = run.rstrip("/").rpartition("/")
    if parent == "runs" or parent.endswith("/runs"):
        store, run = parent.removesuffix("runs").rstrip("/") or ".", name
    return steps.open_run(store, run)


FIRST = ["sample_id", "prompt", "picture"]
"""Columns that come first."""


@dataclass(frozen=True)
class OpenedRun:
    """A run of a store. Running runs can be read too: each call looks at what stands now."""

    _run: Run

    def __repr__(self) -> str:
        return f"OpenedRun({self.url})"

    @property
    def id(self) -> str:
        """Return the run's id."""
        return self._run.plan.run_id

    @property
    def url(self) -> str:
        """Return the root of the run."""
        return self._run.url

    @property
    def rewards(self) -> tuple[str, ...]:
        """Return the labels of the rewards that score rollouts, the monitored statistics among them."""
        return tuple(reward.fn.label for reward in self._run.scored)

    def settings(self) -> dict[str, Any]:
        """Return the settings of the recipe, without those of the machine."""
        return self._run.recipe.identity()

    def metrics(self) -> pd.DataFrame:
        """Return ``metrics.jsonl`` as a table; a row an optimizer step or artifact. Empty before the first update."""
        data = stores.read_if_exists(stores.join(self.url, FILE)) or b""
        numbers = {"iteration", "policy_version", "step"}
        table = (
            pd.read_json(io.BytesIO(data), lines=True) if data else pd.DataFrame(columns=["stage", *sorted(numbers)])
        )
        return table.astype(dict.fromkeys(numbers & {*table.columns}, "Int64"))

    def stages(self) -> pd.DataFrame:
        """Return a row a stage, in order: ``name``, ``stage``, ``k``, ``state``, ``attempts``, ``seconds``,
        ``reward``, ``loss``, ``why`` and ``slot``, as in ``cosmos-flows status --json``.
        """
        rows = [
            {"name": one.step.name, "stage": one.step.stage, "k": one.step.k, "state": one.word}
            | {name: getattr(one, name) for name in ("attempts", "seconds", "reward", "loss", "why")}
            | {"slot": one.step.slot}
            for one in states(self._run)
        ]
        return pd.DataFrame(rows).astype({"k": "Int64", "seconds": "float64", "reward": "float64", "loss": "float64"})

    def samples(self, iteration: int) -> pd.DataFrame:
        """Return the samples of a rollout in the order of generation, with what became of them.

        Columns: ``sample_id``, ``prompt_id``, ``prompt``, ``seed`` and the other facts of the index; for each reward
        a column with its name, NaN where it has no score, and ``<name>.error``; ``reward``, ``advantage`` and ``used``
        once the update stands; ``picture``, read when looked at, None for a sample that is not finite.
        Raises :class:`ConfigError` if the run has no such rollout, :class:`ArtifactError` if a file is damaged.
        """
        if not self._run.trains_on_rewards:
            raise ConfigError(f"{self.id} trains on data and generates no rollouts; use held_out(policy_version)")
        names = {reward: f"reward-{reward}" for reward in self.rewards}
        slots = {reward: self._run.slots.iteration(iteration, stage) for reward, stage in names.items()}
        table = self._scored(self._run.slots.iteration(iteration, "rollout"), f"rollout {iteration}", slots)
        return self._with_advantages(table, iteration)

    def held_out(self, policy_version: int) -> pd.DataFrame:
        """Return the held-out samples of a policy version, like :meth:`samples` but without advantages."""
        labels = [reward.fn.label for reward in self._run.recipe.rewards]
        slots = {reward: self._run.slots.version(policy_version, f"evaluate-{reward}") for reward in labels}
        slot = self._run.slots.version(policy_version, "evaluate")
        return self._scored(slot, f"held-out samples of policy {policy_version}", slots)

    def policy(self, version: int) -> Policy:
        """Return a policy version; 0 is the one that the run began with.

        Raises :class:`ConfigError` if there is no such version yet.
        """
        return Policy(version, self._run, input_of(self._made(self._run.slots.policy(version), f"policy {version}")))

    def _made(self, slot: str, what: str) -> str:
        if standing(slot)[1] is None:
            shown_by = about(self._run.store_url, "status", self.id)
            raise ConfigError(f"{self.id} has no {what}; `{shown_by}` shows what stands")
        return slot

    def _scored(self, slot: str, what: str, scores: dict[str, str]) -> pd.DataFrame:
        """Return the index of an artifact of samples, with a column a reward that stands, and pictures."""
        artifact = Artifact(input_of(self._made(slot, what)))
        table, members = read_index(artifact), Members(artifact)
        for label, scored in scores.items():
            if standing(scored)[1] is None:
                continue
            reward = Artifact(input_of(scored))
            found = read_table(reward, contracts.Reward.SCORES)
            found = found.merge(read_table(reward, contracts.Reward.ANSWERS), on="sample_id", how="left")
            found = found.set_index("sample_id").reindex(table["sample_id"])
            table[label] = found["score"].where(found["valid"].eq(True)).to_numpy("float64")
            table[f"{label}.error"] = found["error"].fillna("").to_numpy()
        units = zip(table["sample_id"], table.pop("unit"), table["finite"], strict=True)
        table["picture"] = [Picture(name, int(unit), members) if finite else None for name, unit, finite in units]
        return table.reindex(columns=[*FIRST, *(name for name in table.columns if name not in FIRST)])

    def _with_advantages(self, table: pd.DataFrame, iteration: int) -> pd.DataFrame:
        update = self._run.slots.iteration(iteration, "update")
        if standing(update)[1] is None:
            return table
        trained = read_table(Artifact(input_of(update)), contracts.Update.ADVANTAGES)
        return table.merge(trained[["sample_id", "reward", "advantage", "used"]], on="sample_id", how="left")
