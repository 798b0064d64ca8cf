"""One line for each run of a store, from its plan and its newest manifests. Stages are not checked."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from cosmos_rl_core.errors import ArtifactError, ConfigError, first_line
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.lease import BEAT_S
from flows.ledger.pages import newest_page
from flows.library.best import judged
from flows.library.life import Life, Word, iterations_made, newest_first
from flows.library.outlook import Score, iterations_left_s
from flows.planning.base import AnyRun
from flows.planning.plan import read_plan
from flows.planning.run import run_of
from stages.artifacts.slots import current_of
from stages.scoring.summaries import known_error

AT_ONCE = 16
"""Runs that are read in parallel. A run whose process is on another machine takes some seconds."""


@dataclass(frozen=True)
class RunLine:
    """One run of a store."""

    run: str
    state: Word | Literal["damaged"]
    """``damaged``: its plan or a manifest cannot be read."""
    algorithm: str = ""
    iterations: int = 0
    """Number of finished iterations."""
    num_iterations: int = 0
    """Number of planned iterations."""
    reward_name: str = ""
    """Name of the number that ranks policies, such as ``held-out weighted reward`` or ``held-out loss``; the first
    reward of the rollouts if the run has judged no policy."""
    reward: float | None = None
    """The number of the newest policy that was judged, else the mean of the newest rollout; None without both."""
    reward_error: float | None = None
    """Standard error of ``reward`` over prompts; None if it was not recorded, and for a weighted sum."""
    first_reward: float | None = None
    """The number of the policy before training."""
    first_reward_error: float | None = None
    """Standard error of ``first_reward``."""
    rewards: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Mean scores by each reward, of the first policy or rollout and the newest; one number if they are the same."""
    left_s: float | None = None
    """Seconds that the other iterations will take, each like the mean so far; None if unknown."""
    device_s: float | None = None
    """Device seconds until now; None without a ledger."""
    error: str = ""
    """Why the run failed, or what is damaged, in one line."""


def all_runs(store_url: str, names: Sequence[str] = ()) -> list[RunLine]:
    """Return every run of the store, sorted by name, or the named runs, in their order.

    A run that cannot be read has a line like the others. Raises :class:`ConfigError` if the store or a named run does
    not exist.
    """
    store.check_readable(store_url)
    for name in names:
        with suppress(ArtifactError):  # its line says so
            read_plan(store_url, name)
    names = names or sorted(store.names(store.join(store.absolute(store_url), "runs")))
    # One by one: a plan replaces the plugins from outside that the plan before it named.
    opened = [_opened(store_url, name) for name in names]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda one: one if isinstance(one, RunLine) else _line(*one), opened))


def _opened(store_url: str, name: str) -> tuple[AnyRun, list[str]] | RunLine:
    """Return a run and its rewards, the rewards that train first, or the line of a damaged one."""
    try:
        run = run_of(read_plan(store_url, name), store_url)
        ordered = sorted(run.recipe.rewards, key=lambda reward: reward.role != "train")
        return run, [reward.fn.label for reward in ordered]
    except (ArtifactError, ConfigError) as error:
        return RunLine(run=name, state="damaged", error=first_line(error))


def _line(run: AnyRun, labels: Sequence[str]) -> RunLine:
    name = run.plan.run_id
    try:
        life = Life.of(run, 2 * BEAT_S)
        iterations = iterations_made(run)
        measured = _held_out(run) or _of_rollouts(run, labels)
        newest = newest_page(run.url)
        return RunLine(
            run=name,
            state=life.word,
            algorithm=run.recipe.train.train_policy.type,
            iterations=iterations,
            num_iterations=run.recipe.train.num_iterations,
            reward_name=measured.name,
            **measured.numbers(),
            rewards=measured.rewards,
            left_s=iterations_left_s(run, iterations, newest),
            device_s=None if newest is None else newest.totals.device_s,
            error=first_line(life.progress.error) if life.word == "failed" else "",
        )
    except (ArtifactError, ConfigError) as error:
        return RunLine(run=name, state="damaged", error=first_line(error))


@dataclass(frozen=True)
class _Measured:
    """The number that ranks policies, and every reward, of the first and the newest policy that was judged."""

    name: str = ""
    ends: list[Score] = field(default_factory=list[Score])
    rewards: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    def numbers(self) -> dict[str, float | None]:
        """Return the fields of a line for the newest policy and, if it is another one, the first."""
        found: dict[str, float | None] = {}
        if self.ends:
            found |= {"reward": self.ends[-1].mean, "reward_error": self.ends[-1].standard_error}
        if len(self.ends) > 1:
            found |= {"first_reward": self.ends[0].mean, "first_reward_error": self.ends[0].standard_error}
        return found


def _held_out(run: AnyRun) -> _Measured | None:
    """Return the measurements on held-out prompts or media; None without any."""
    versions = newest_first(run, "exports") if run.evaluates or run.validates else []
    newest = next(filter(None, (judged(run, k) for k in versions)), None)
    if newest is None:
        return None
    first = judged(run, versions[-1])
    ends = [newest] if first is None or first.k == newest.k else [first, newest]
    rewards = {name: [end.rewards[name] for end in ends if name in end.rewards] for name in newest.rewards}
    return _Measured(newest.by, [Score(end.k, end.figure, end.standard_error) for end in ends], rewards)


def _of_rollouts(run: AnyRun, labels: Sequence[str]) -> _Measured:
    """Return the mean scores of the first and the newest rollout."""
    if not labels or not run.trains_on_rewards:
        return _Measured()
    rollouts = newest_first(run, "iterations")
    found = {label: _first_and_newest(run, rollouts, label) for label in labels}
    rewards = {name: [score.mean for score in scores] for name, scores in found.items() if scores}
    return _Measured(labels[0], found[labels[0]], rewards)


def _first_and_newest(run: AnyRun, rollouts: Sequence[int], reward: str) -> list[Score]:
    """Return the mean scores of the last and the first of some iterations, once if they are the same."""
    newest = next(filter(None, (_score(run, k, reward) for k in rollouts)), None)
    first = _score(run, rollouts[-1], reward) if rollouts else None
    return list(dict.fromkeys(filter(None, (first, newest))))


def _score(run: AnyRun, k: int, reward: str) -> Score | None:
    """Return the mean score of the samples of an iteration; None without any."""
    _, manifest = current_of(run.slots.iteration(k, f"reward-{reward}"))
    found = None if manifest is None else manifest.summary.get(reward)
    return Score(k, found, known_error(manifest)) if manifest is not None and isinstance(found, float) else None
