"""The runs of a what-if: settings that are trained anew on the stored rollouts of a run."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import ConfigError
from flows.checking import checks
from flows.forking import given
from flows.forking.plan import plan_of_fork
from flows.lineage.origin import StoredRollouts
from flows.planning.plan import ForkOf, Settings
from flows.planning.steps import read_run
from flows.studying.members import Names, Planned
from flows.studying.study import Member, Study, named
from flows.studying.sweeps import combinations, label
from flows.terminal.numbers import parsed
from stages.artifacts.slots import one_look

UNCHANGED = "as it was"
"""Setting of the run itself: its own policies, evaluated where the others are."""
CONTROLS = 3
"""Default number of orders that rewards are shuffled in, for each setting."""
_NO_MORE = "validation.freq=0"
"""Policies between are not evaluated."""


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
    if algorithm and origin.trains_on_rewards and not plugins.load("algorithms", algorithm).Options.rewarded:
        raise ConfigError(
            f"--algorithm {algorithm} trains on media of a dataset, {run_id} has rewarded rollouts; expected such as "
            "rft, which takes supervised steps on the best of them, nft or dpo"
        )
    with one_look():
        first, until = _span(iterations) if iterations else (0, given.count(origin, 0))
    if until <= first:
        raise ConfigError(f"{run_id} has no rollout yet; begin once it has one")
    settings = replace(settings, iterations=until, overrides=(_NO_MORE, *settings.overrides), run_id=None)
    own = (f"train.train_policy.type={algorithm}",) if algorithm else ()
    own += tuple(one for one in settings.overrides if one != _NO_MORE)
    names = Names()

    def add(setting: str, changes: tuple[str, ...], file: str | None, control: int = 0) -> None:
        changed = replace(settings, overrides=(_NO_MORE, *changes), fork=ForkOf(run_id, first, file, stored))
        assert changed.fork is not None
        plan = names.mistakes.catch(partial(plan_of_fork, changed.fork, changed, misfits))
        if plan is not None:
            member = Member(run=plan.run_id, setting=setting, seed=plan.recipe.train.seed, control=control)
            names.add(Planned(member, changed, plan))

    add(UNCHANGED, (), None)
    for swept in combinations(sweeps):
        changes = (*own, *swept)
        setting = label([*changes, *([f"rewards={rewards}"] if rewards else [])]) if changes or rewards else UNCHANGED
        add(setting, changes, rewards)
        for control in range(1, controls + 1) if origin.trains_on_rewards and setting != UNCHANGED else ():
            add(setting, (*changes, f"train.train_policy.shuffle_groups={control}"), rewards, control)
    planned = names.found()
    members = tuple(one.member for one in planned)
    return named(name, "what-if", run_id, members, f"{run_id}-if"), planned


def _span(iterations: str) -> tuple[int, int]:
    """Return the first iteration and that after the last."""
    found = parsed(iterations)
    if found != [*range(found[0], found[-1] + 1)]:
        raise ConfigError(f"--iterations {iterations}: a chain of updates has no gaps; name one range, such as 0-15")
    return found[0], found[-1] + 1
