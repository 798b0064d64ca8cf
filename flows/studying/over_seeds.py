"""The runs of a study over seeds: a recipe with every seed, in every setting of a sweep."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.errors import ConfigError
from flows.checking import checks
from flows.forking.plan import LONGEST_NAME
from flows.planning.plan import ForkOf, Settings, plan_of
from flows.studying.members import Planned, Planning
from flows.studying.study import Member, Study, named
from flows.studying.sweeps import combinations, label
from flows.terminal.numbers import parsed

_ANEW = ("policy.", "train.optm_name", "train.train_policy.type", "plugins")
"""Beginnings of settings that make another policy version 0, which a fork cannot begin with."""


def plan_of_study(
    settings: Settings,
    *,
    seeds: str,
    sweeps: Sequence[str] = (),
    name: str | None = None,
    misfits: checks.Misfits | None = None,
) -> tuple[Study, list[Planned]]:
    """Return the study and its runs. Writes nothing.

    ``settings`` has the recipe and the settings that all runs have; ``seeds`` are such as ``0-4``. Runs of a seed share
    what does not depend on the setting: the others begin as forks of the first at policy 0, where that is possible.
    Raises one :class:`ConfigError` with every mistake.
    """
    planning = Planning()
    if any(sweep.partition("=")[0].strip() == "train.seed" for sweep in sweeps):
        raise ConfigError("--sweep train.seed: name the seeds by --seeds, so that runs of a seed are compared")
    for seed in parsed(seeds, "--seeds"):
        first: Planned | None = None
        for swept in combinations(sweeps):
            overrides = (*settings.overrides, f"train.seed={seed}", *swept)
            changed = replace(settings, overrides=overrides, run_id=None)
            plan = planning.mistakes.catch(partial(plan_of, changed, misfits=misfits))
            if plan is None:
                continue
            member = Member(run=plan.run_id, setting=label(swept), seed=seed)
            one = Planned(member, changed, plan)
            if first is None:
                first = one
            elif not any(setting.startswith(_ANEW) for setting in swept):
                shared = f"{first.member.run}-at-0"[:LONGEST_NAME]
                run = f"{shared}-{digest(plan.identity())[:8]}"
                one = replace(one, begins=first.plan, member=member.model_copy(update={"run": run}))
            planning.add(one)
    planned = planning.found()
    until = max(one.plan.recipe.train.num_iterations for one in planned)
    members = tuple(one.member for one in planned)
    study = Study(name=name or "", of="seeds", source=settings.recipe, until=until, members=members)
    return named(study, f"{Path(settings.recipe).stem}-study"), planned


def as_begun(one: Planned) -> Settings:
    """Return the settings of a run; of a run that begins as a fork, once its origin has policy version 0."""
    if one.begins is None:
        return one.settings
    return replace(one.settings, recipe="", fork=ForkOf(one.begins.run_id, 0))
