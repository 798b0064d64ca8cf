"""The runs of a what-if: settings that are trained anew on the stored rollouts of a run."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from cosmos_rl_core import plugins
from cosmos_rl_core.algorithms._base import algorithm_of
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.weights.parts import STATE
from flows.checking import checks
from flows.forking import given
from flows.forking.plan import plan_of_fork, policy_at
from flows.lineage.origin import StoredRollouts
from flows.planning.plan import ForkOf, Settings
from flows.planning.steps import read_run
from flows.studying.members import Planned, Planning
from flows.studying.study import Member, Study, named
from flows.studying.sweeps import combinations, label
from flows.terminal.numbers import parsed
from stages.artifacts.slots import is_dropped, one_look

UNCHANGED = "as it was"
"""Name of the setting of the run itself, whose own policies are evaluated like the others."""
CONTROLS = 3
"""Default number of orders that rewards are shuffled in, for each setting."""
_NO_MORE = "validation.freq=0"
"""Setting by which policies between the first and the last are not evaluated."""
_OF_ALL = ("validation.", "launch.", "logging.")
"""Beginnings of the names of settings that all runs of a what-if share."""


def plan_of_what_if(
    run_id: str,
    settings: Settings,
    stored: StoredRollouts,
    *,
    iterations: str | None = None,
    algorithm: str | None = None,
    rewards: str | None = None,
    sweeps: Sequence[str] = (),
    controls: int = CONTROLS,
    name: str | None = None,
    misfits: checks.Misfits | None = None,
) -> tuple[Study, list[Planned]]:
    """Return the study and its runs. Writes nothing.

    ``settings`` has the store and the settings that all of them change. ``iterations`` are those whose rollouts are
    used, such as ``0-15``; by default all that the run has. Raises one :class:`ConfigError` with every mistake.
    """
    origin = read_run(settings.store, run_id)
    if origin.recipe.validation is None:
        raise ConfigError(f"{run_id} has no [validation], so nothing would be compared; run its recipe with one first")
    if algorithm and origin.trains_on_rewards and not plugins.load("algorithms", algorithm).Options.rewarded:
        raise ConfigError(
            f"--algorithm {algorithm} trains on media of a dataset, {run_id} has rewarded rollouts; expected such as "
            "rft, which takes supervised steps on the best of them, nft or dpo"
        )
    begun = origin.plan.first
    with one_look():
        first, until = _span(iterations) if iterations else (begun, given.count(origin, begun))
    if until <= first:
        raise ConfigError(f"{run_id} has no rollout yet; begin once it has one")
    # All settings are evaluated in the same way.
    shared = (_NO_MORE, *(one for one in settings.overrides if one.startswith(_OF_ALL)))
    own = (f"train.train_policy.type={algorithm}",) if algorithm else ()
    own += tuple(one for one in settings.overrides if not one.startswith(_OF_ALL))
    runs = _Runs(replace(settings, iterations=until, run_id=None, overrides=shared), run_id, first, stored, misfits)
    last = policy_at(origin, until)
    if rewards and last is not None and not any(last.has_part(part) and is_dropped(last, part) for part in STATE):
        runs.add_last(until, rewards)
    else:
        runs.add(UNCHANGED, (), None)
    for swept in combinations(sweeps):
        changes = (*own, *swept)
        setting = label([*changes, *([f"rewards={rewards}"] if rewards else [])]) if changes or rewards else UNCHANGED
        if not runs.add(setting, changes, rewards):
            continue
        for control in range(1, controls + 1) if origin.trains_on_rewards else ():
            runs.add(setting, (*changes, f"train.train_policy.shuffle_groups={control}"), rewards, control)
    planned = runs.planning.found()
    members = tuple(one.member for one in planned)
    study = Study(name=name or "", of="what-if", source=run_id, until=until, members=members)
    return named(study, f"{run_id}-if"), planned


@dataclass(frozen=True)
class _Runs:
    """The runs of a what-if while they are planned."""

    settings: Settings
    """Settings of all these runs."""
    run_id: str
    first: int
    stored: StoredRollouts
    misfits: checks.Misfits | None
    planning: Planning = field(default_factory=Planning)

    def add(self, setting: str, changes: tuple[str, ...], rewards: str | None, control: int = 0) -> bool:
        """Plan a run; return False if it has a mistake, or if an equal run is there."""
        # A run without changes keeps the origin's own loss, whatever the anchor of the others.
        how = self.stored if changes or rewards else StoredRollouts(max_drift=self.stored.max_drift)
        return self._add(setting, changes, ForkOf(self.run_id, self.first, rewards, how), control)

    def add_last(self, until: int, rewards: str) -> None:
        """Plan a run that evaluates the origin's last policy under other rewards, and trains nothing."""
        self._add(UNCHANGED, (), ForkOf(self.run_id, until, rewards))

    def _add(self, setting: str, changes: tuple[str, ...], fork: ForkOf, control: int = 0) -> bool:
        changed = replace(self.settings, overrides=(*self.settings.overrides, *changes), fork=fork)
        plan = self.planning.mistakes.catch(partial(plan_of_fork, fork, changed, self.misfits))
        if plan is None:
            return False
        if control and algorithm_of(plan.recipe.train.train_policy).needs.given_pairs:
            told = f"{setting}: given pairs need no reward, so shuffled rewards change nothing; set --controls 0"
            self.planning.mistakes.append(told)
        member = Member(run=plan.run_id, setting=setting, seed=plan.recipe.train.seed, control=control)
        return self.planning.add(Planned(member, changed, plan))


def _span(iterations: str) -> tuple[int, int]:
    """Return the first iteration, and the last one plus 1."""
    found = parsed(iterations)
    if found != [*range(found[0], found[-1] + 1)]:
        raise ConfigError(f"--iterations {iterations}: a chain of updates has no gaps; name one range, such as 0-15")
    return found[0], found[-1] + 1
