"""The plan of a fork: the recipe of its origin with changes, checked against the artifacts of the origin."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from cosmos_rl_core import plugins
from cosmos_rl_core.canonical import differences, digest
from cosmos_rl_core.config.base import as_written
from cosmos_rl_core.config.reading import Values, rewards_in, with_changes
from cosmos_rl_core.errors import ConfigError, Mistakes
from cosmos_rl_core.weights.parts import STATE
from flows.checking import checks
from flows.forking import given
from flows.lineage.origin import Origin
from flows.planning import kinds, stored
from flows.planning.base import AnyPlan, AnyRun
from flows.planning.plan import ForkOf, Plan, Settings, plan_from
from flows.planning.steps import read_run
from flows.terminal.numbers import ranges
from stages.artifacts.manifest import Manifest
from stages.artifacts.slots import current_of, is_dropped

_FROZEN = ("policy.", "train.optm_name")
"""Settings that decide the shape of a policy and of its optimizer's state, which a fork goes on with."""
_FREE = ("policy.diffusers.", "policy.model_gradient_checkpointing")
"""Settings below :data:`_FROZEN` that decide neither shape nor state."""
_OF_TRAINING = ("policy.lora.", "train.optm_name")
"""Settings below :data:`_FROZEN` that a fork on stored rollouts may change if it begins with policy version 0."""
_WORDS = re.compile(r"\w+")
LONGEST_NAME = checks.LONGEST_ID - checks.ENDING
"""Most characters of a default name before its digest."""


def plan_of_fork(wanted: ForkOf, settings: Settings, misfits: checks.Misfits | None = None) -> Plan:
    """Return the plan of a fork. ``settings`` has the parameters that every run takes. Writes nothing.

    Raises one :class:`ConfigError` with every mistake: no such run or policy, state that the origin does not keep,
    settings that its policies do not allow.
    """
    run, mistakes = read_run(settings.store, wanted.run), Mistakes()
    source = f"{wanted.run} at policy {wanted.at}"
    mistakes.extend(_missing(run, wanted.at))
    values = _values(run.plan, wanted, settings, mistakes)
    named = replace(settings, recipe=source, run_id=settings.run_id or "fork")
    # A plan also has settings that no recipe names, such as a solver. Some of them have no effect.
    written = {override.partition("=")[0].rpartition(".")[2] for override in settings.changes}
    written |= {"rewards"} if wanted.rewards else set()
    plan = plan_from(
        values, named, mistakes, misfits=misfits, told=lambda idle: not written.isdisjoint(_WORDS.findall(idle))
    )
    begins = Origin(
        run=wanted.run,
        at=wanted.at,
        optimizer_steps=clocks_at(run, wanted.at),
        # If only later scores of the origin compare with each other, the fork's compare from its own beginning on.
        alike=judged_by(run.plan) == judged_by(plan) and run.plan.baseline == 0,
        stored=None if wanted.stored is None else stored.settled(wanted.stored, run, plan),
    )
    plan = plan.model_copy(update={"origin": begins, "run_id": "?"})
    wrong = [*_unlike(run.plan, plan)]
    wrong += given.mistakes(run, plan) if wanted.stored is not None and not wrong else ()
    if wrong:
        raise ConfigError("\n  ".join([f"{source}:", *wrong]))
    name = (f"{wanted.run}-at-{wanted.at}" if wanted.stored is None else f"{wanted.run}-if")[:LONGEST_NAME]
    return plan.model_copy(update={"run_id": settings.run_id or f"{name}-{digest(plan.identity())[:8]}"})


def _values(plan: AnyPlan, wanted: ForkOf, settings: Settings, mistakes: Mistakes) -> Values:
    """Return the values of the origin's recipe with the fork's changes."""
    kind = kinds.of(plan)
    values: Values = as_written(plan.recipe) if kind is None else kind.written(plan)
    if wanted.rewards is not None and (rewards := mistakes.catch(rewards_in, wanted.rewards)) is not None:
        values["rewards"] = rewards
    before = _algorithm(values)
    values = with_changes(values, Path.cwd() / "recipe", settings.changes, settings.cluster, mistakes)
    if _algorithm(values) != before:
        mistakes.catch(_leave_out, values, before)
    return values


def _algorithm(values: Values) -> Any:
    return values["train"]["train_policy"].get("type")


def _leave_out(values: Values, before: str) -> None:
    """Remove options of the algorithm ``before`` that the new algorithm does not have.

    Raises :class:`ConfigError` if there is no such algorithm.
    """
    options = values["train"]["train_policy"]
    known = plugins.load("algorithms", str(options["type"])).Options.model_fields
    for name in plugins.load("algorithms", before).Options.model_fields.keys() - known.keys():
        options.pop(name, None)


def _missing(run: AnyRun, at: int) -> Iterator[str]:
    """Yield why a run has no policy version that a fork can go on with."""
    made = {k: found for k in range(run.recipe.train.num_iterations + 1) if (found := policy_at(run, k)) is not None}
    if not made:
        yield f"run {run.plan.run_id} has no policy version yet; begin the fork once it has one"
    elif at not in made:
        yield f"run {run.plan.run_id} has no policy version {at}; it has {ranges([*made])}"
    elif gone := [part for part in STATE if made[at].has_part(part) and is_dropped(made[at], part)]:
        whole = [k for k, one in made.items() if not any(one.has_part(p) and is_dropped(one, p) for p in STATE)]
        yield (
            f"policy version {at} has lost {', '.join(gone)} (train.ckpt.max_keep), without which training cannot go "
            f"on; versions that have all: {ranges(whole)}"
        )


def policy_at(run: AnyRun, k: int) -> Manifest | None:
    """Return the manifest of a policy version; None if there is none."""
    return current_of(run.slots.policy(k))[1]


def clocks_at(run: AnyRun, k: int) -> int:
    """Return the number of optimizer steps before iteration k of a run, from its policy version; 0 without one."""
    made = policy_at(run, k)
    steps = {} if made is None else made.config.get("steps", {})
    return steps.get("first_step", 0) + len(steps.get("lrs", ()))


def _unlike(origin: AnyPlan, plan: AnyPlan) -> Iterator[str]:
    """Yield the settings of a fork that the policies of its origin do not allow."""
    if origin.recipe.train.train_policy.rewarded != plan.recipe.train.train_policy.rewarded:
        kinds_of = [each.recipe.train.train_policy.type for each in (origin, plan)]
        yield f"train.train_policy.type: {' -> '.join(kinds_of)}; only one of them trains on rewards: begin a new run"
    if origin.model.digest != plan.model.digest:
        yield (
            f"policy.model_name_or_path: the policies were trained on files {origin.model.digest[:12]}, these are "
            f"{plan.model.digest[:12]}; expected the same base model"
        )
    # A fork that trains on stored rollouts from version 0 on makes that version itself.
    free = (*_FREE, *_OF_TRAINING) if not plan.generates and plan.first == 0 else _FREE
    for change in differences(origin.identity()["recipe"], plan.identity()["recipe"]):
        if change.startswith(_FROZEN) and not change.startswith(free):
            yield f"{change}; the origin's policies need the first value: begin a new run, or set policy.init_from"


def judged_by(plan: AnyPlan) -> Any:
    """Return the settings that two runs must share for their scores and evaluations to be compared."""
    recipe = plan.identity()["recipe"]
    validation = {name: value for name, value in (recipe.get("validation") or {}).items() if name != "freq"}
    warning = None if plan.early_warning is None else plan.early_warning.model_dump(mode="json")
    return [recipe.get("rewards"), validation, warning]
