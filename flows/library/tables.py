"""The tables of a run: numbers, stages, and samples with their scores and advantages."""

import io
from typing import Any

import pandas as pd

from cosmos_rl_core.algorithms._advantages import BEATS
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage import store
from flows.library.picture import Picture
from flows.library.policy import made
from flows.library.states import states
from flows.planning.base import AnyRun
from flows.planning.plan import METRICS_FILE
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import current_of, input_of
from stages.formats.members import Members
from stages.formats.samples import read_index, undecoded
from stages.formats.tables import read_table

FIRST = ["sample_id", "prompt", "picture"]
"""Columns that come first."""


def metrics(run: AnyRun) -> pd.DataFrame:
    """Return the table of :meth:`flows.library.opened_run.OpenedRun.metrics`."""
    data = store.read_if_exists(store.join(run.url, METRICS_FILE)) or b""
    numbers = {"iteration", "policy_version", "step"}
    # By default pandas rounds the last digits, and reads numbers of some names as dates.
    exact: dict[str, Any] = {"precise_float": True, "convert_dates": False}
    empty = pd.DataFrame(columns=["stage", *sorted(numbers)])
    table = pd.read_json(io.BytesIO(data), lines=True, **exact) if data else empty
    return table.astype(dict.fromkeys(numbers & {*table.columns}, "Int64"))


def stages(run: AnyRun) -> pd.DataFrame:
    """Return the table of :meth:`flows.library.opened_run.OpenedRun.stages`."""
    rows = [
        {"name": one.step.name, "stage": one.step.stage, "k": one.step.k, "state": one.word}
        | {name: getattr(one, name) for name in ("attempts", "seconds", "reward", "loss", "why")}
        | {"slot": one.step.slot}
        for one in states(run)
    ]
    return pd.DataFrame(rows).astype({"k": "Int64", "seconds": "float64", "reward": "float64", "loss": "float64"})


def samples(run: AnyRun, iteration: int) -> pd.DataFrame:
    """Return the table of :meth:`flows.library.opened_run.OpenedRun.samples`."""
    if not run.trains_on_rewards:
        raise ConfigError(f"{run.plan.run_id} trains on data and generates no rollouts; use held_out(policy_version)")
    names = {reward.fn.label: f"reward-{reward.fn.label}" for reward in run.scored}
    slots = {reward: run.slots.iteration(iteration, stage) for reward, stage in names.items()}
    table = _scored(run, run.slots.iteration(iteration, "rollout"), f"rollout {iteration}", slots)
    if current_of(decoded := run.slots.iteration(iteration, "decode"))[1] is not None:
        later = _pictures(artifact := Artifact(input_of(decoded)), read_index(artifact))
        table["picture"] = [
            was or later.get(one) for was, one in zip(table["picture"], table["sample_id"], strict=True)
        ]
    return _with_advantages(table, run.slots.iteration(iteration, "update"))


def held_out(run: AnyRun, policy_version: int) -> pd.DataFrame:
    """Return the table of :meth:`flows.library.opened_run.OpenedRun.held_out`."""
    labels = [reward.fn.label for reward in run.recipe.rewards]
    slots = {reward: run.slots.version(policy_version, f"evaluate-{reward}") for reward in labels}
    slot = run.slots.version(policy_version, "evaluate")
    return _scored(run, slot, f"held-out samples of policy {policy_version}", slots)


def _scored(run: AnyRun, slot: str, what: str, scores: dict[str, str]) -> pd.DataFrame:
    """Return the index of an artifact of samples, with pictures and a column for each reward that has finished."""
    artifact = Artifact(made(run, slot, what))
    table = read_index(artifact)
    for label, scored in scores.items():
        if current_of(scored)[1] is None:
            continue
        reward = Artifact(input_of(scored))
        found = read_table(reward, contracts.Reward.SCORES)
        found = found.merge(read_table(reward, contracts.Reward.ANSWERS), on="sample_id", how="left")
        found = found.set_index("sample_id").reindex(table["sample_id"])
        table[label] = found["score"].where(found["valid"].eq(True)).to_numpy("float64")
        table[f"{label}.error"] = found["error"].fillna("").to_numpy()
    table["picture"] = [*_pictures(artifact, table).values()]
    return table.reindex(columns=[*FIRST, *(name for name in table.columns if name not in (*FIRST, "unit"))])


def _pictures(artifact: Artifact, index: pd.DataFrame) -> dict[str, Picture | None]:
    """Return the picture of each sample by its id; None for a sample without one."""
    members = Members(artifact)
    rows = zip(index["sample_id"], index["unit"], index["finite"] & ~undecoded(index), strict=True)
    return {name: Picture(name, int(unit), members) if there else None for name, unit, there in rows}


def _with_advantages(table: pd.DataFrame, update: str) -> pd.DataFrame:
    """Add the rewards and advantages of the update in a slot; nothing before it has finished."""
    if current_of(update)[1] is None:
        return table
    trained = read_table(Artifact(input_of(update)), contracts.Update.ADVANTAGES)
    names = [name for name in ("sample_id", "reward", "advantage", "used", BEATS) if name in trained]
    return table.merge(trained[names], on="sample_id", how="left")
