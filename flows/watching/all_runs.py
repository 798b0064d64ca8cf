"""One line for each run of a store, from its plan and its newest manifests. Stages are not checked."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from rich.table import Column, Table

from cosmos_rl_core.errors import ArtifactError, ConfigError, first_line
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.lease import BEAT_S
from flows.planning.plan import read_plan
from flows.planning.run import Run
from flows.watching.status import Life, life_of
from stages.artifacts.slots import standing

AT_ONCE = 16
"""Runs that are read in parallel. A run whose process is on another machine takes some seconds."""


@dataclass(frozen=True)
class RunLine:
    """One run of a store."""

    run: str
    state: Life | Literal["damaged"]
    """``damaged``: its plan or a manifest cannot be read."""
    algorithm: str = ""
    iterations: int = 0
    """Number of finished iterations."""
    num_iterations: int = 0
    """Number of planned iterations."""
    reward_name: str = ""
    reward: float | None = None
    """Mean of the newest scores; None without scores."""
    error: str = ""
    """Why the run failed, or what is damaged, in one line."""


def all_runs(store_url: str) -> list[RunLine]:
    """Return every run of the store, sorted by name. Raises :class:`ConfigError` if the store does not exist."""
    store.check_readable(store_url)
    names = sorted(store.names(store.join(store.absolute(store_url), "runs")))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda name: _line(store_url, name), names))


def rendered(lines: Sequence[RunLine], store_url: str) -> Iterator[str | Table]:
    """Yield lines and the table, in order."""
    if not lines:
        yield f"the store {store.absolute(store_url)} has no runs; start one with `cosmos-flows run`"
        return
    titles = ("run", "algorithm", "state", "iterations", "reward")
    table = Table(*(Column(title, overflow="fold") for title in titles), box=None, pad_edge=False, header_style="bold")
    for line in lines:
        of_all = f"{line.iterations}/{line.num_iterations}" if line.num_iterations else ""
        reward = "" if line.reward is None else f"{line.reward_name} {line.reward:.3f}"
        table.add_row(line.run, line.algorithm, line.state, of_all, reward)
    yield table
    yield from (f"{line.run} is {line.state}: {line.error}" for line in lines if line.error)


def _line(store_url: str, name: str) -> RunLine:
    try:
        run = Run(read_plan(store_url, name), store_url)
        life, progress, _ = life_of(run, 2 * BEAT_S)
        reward = run.headline_reward
        return RunLine(
            run=name,
            state=life,
            algorithm=run.recipe.train.train_policy.type,
            iterations=_iterations(run),
            num_iterations=run.recipe.train.num_iterations,
            reward_name=reward,
            reward=_newest_score(run, reward) if reward else None,
            error=first_line(progress.error) if life == "failed" else "",
        )
    except (ArtifactError, ConfigError) as error:
        return RunLine(run=name, state="damaged", error=first_line(error))


def _iterations(run: Run) -> int:
    """Return the number of iterations up to the newest policy."""
    made = _newest_first(run, "iterations")
    return next((k + 1 for k in made if standing(run.slots.policy(k + 1))[1] is not None), 0)


def _newest_score(run: Run, reward: str) -> float | None:
    """Return the mean score of the newest rollout; of the newest evaluation in a run without rollouts."""
    if run.trains_on_rewards:
        slots = (run.slots.iteration(k, f"reward-{reward}") for k in _newest_first(run, "iterations"))
    else:
        slots = (run.slots.version(k, f"evaluate-{reward}") for k in _newest_first(run, "exports"))
    manifests = (standing(slot)[1] for slot in slots)
    found = next((manifest.summary.get(reward) for manifest in manifests if manifest is not None), None)
    return found if isinstance(found, float) else None


def _newest_first(run: Run, folder: str) -> list[int]:
    return sorted((int(name) for name in store.names(store.join(run.url, folder)) if name.isdecimal()), reverse=True)
