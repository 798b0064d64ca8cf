"""Settings, base models, versions and data of two runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import counted
from flows.comparing.side import Side
from flows.planning import facts, kinds
from flows.planning.base import AnyPlan
from flows.planning.plan import Plan


@dataclass(frozen=True)
class Setting:
    """A value that differs; None where a run does not have it."""

    name: str
    a: Any
    b: Any
    decides: bool = True
    """Whether results depend on it. Machines, logging and numbers of files that are kept decide nothing."""


def settings(a: Side, b: Side) -> list[Setting]:
    """Return the settings of the recipes that differ, defaults included, in their order."""
    decides = dict(facts.flat(a.plan.recipe.identity())) | dict(facts.flat(b.plan.recipe.identity()))
    sides = [dict(facts.flat(one.plan.recipe.model_dump(mode="json"))) for one in (a, b)]
    # A setting that only one of the algorithms has decides results, even at its neutral value.
    return [
        Setting(one.name, one.a, one.b, one.name in decides or None in (one.a, one.b)) for one in _differing(*sides)
    ]


def origins(a: Side, b: Side) -> list[Setting]:
    """Return other differences that decide results: base model, first weights, plugins, stages, numerics."""
    return [*_differing(_origin(a), _origin(b)), *_numerics(a, b)]


def _origin(side: Side) -> dict[str, Any]:
    plan = side.plan
    found: dict[str, Any] = {
        "base model": f"{plan.model.path} ({plan.model.adapter}), files {plan.model.digest[:12]}",
        "begins with": plan.lineage or "the base, or fresh weights on it",
    }
    found |= {f"plugin {pin.name} of {pin.kind}": digest(pin.files)[:12] for pin in plan.plugins}
    return found | {f"version of stage {name}": number for name, number in plan.stage_versions.items()}


def _numerics(a: Side, b: Side) -> Iterator[Setting]:
    """Yield differences of numerics in the stages that both runs have. Each stage has its own number of ranks."""
    ours, theirs = a.collected.numerics, b.collected.numerics
    both = [stage for stage in ours if stage in theirs]
    found: dict[tuple[str, str, str], list[str]] = {}
    for stage in both:
        for one in _differing(*(dict(facts.flat(side[stage])) for side in (ours, theirs))):
            found.setdefault((one.name, str(one.a), str(one.b)), []).append(stage)
    for (name, one, other), stages in found.items():
        where = "" if len(stages) == len(both) else f" of {', '.join(stages)}"
        yield Setting(f"numerics{where}: {name}", one, other)


def _differing(a: dict[str, Any], b: dict[str, Any]) -> Iterator[Setting]:
    for name in dict.fromkeys([*a, *b]):
        if a.get(name) != b.get(name):
            yield Setting(name, a.get(name), b.get(name))


@dataclass(frozen=True)
class Data:
    """One kind of data of both runs."""

    what: str
    a: str
    b: str
    equal: bool
    shared: str = ""
    """Words on how much of the data both runs have; "" if it cannot be counted."""


def data(a: Side, b: Side) -> list[Data]:
    """Return every kind of data that either run has."""
    seeds = a.plan.recipe.train.seed, b.plan.recipe.train.seed
    found = [Data("seed", str(seeds[0]), str(seeds[1]), seeds[0] == seeds[1])]
    if a.plan.prompts or b.plan.prompts:
        found.append(_prompts("prompts trained on", a.plan.prompts, b.plan.prompts))
    if a.plan.validation_prompts or b.plan.validation_prompts:
        found.append(_prompts("held-out prompts", a.plan.validation_prompts, b.plan.validation_prompts))
    if (orders := _orders(a, b)) is not None:
        found.append(orders)
    return [*found, *_media(a.plan, b.plan)]


def _prompts(what: str, a: Sequence[Prompt], b: Sequence[Prompt]) -> Data:
    ids = [[prompt.id for prompt in some] for some in (a, b)]
    return Data(what, str(len(a)), str(len(b)), ids[0] == ids[1], f"{len({*ids[0]} & {*ids[1]})} in both")


def _orders(a: Side, b: Side) -> Data | None:
    """Compare the prompts that iterations sample; None unless both runs trained some iterations on rewards."""
    plans = [one.plan for one in (a, b) if isinstance(one.plan, Plan) and one.run.trains_on_rewards]
    both = range(min(a.trained, b.trained))
    if len(plans) < 2 or not both:
        return None
    drawn = [[[prompt.id for prompt in plan.prompts_of(k)] for k in both] for plan in plans]
    equal = sum(x == y for x, y in zip(*drawn, strict=True))
    first, second = (f"{sum(map(len, each))} in {counted(len(both), 'iteration')}" for each in drawn)
    return Data(
        "prompts drawn", first, second, equal == len(both), f"equal in {equal} of {counted(len(both), 'iteration')}"
    )


def _media(a: AnyPlan, b: AnyPlan) -> Iterator[Data]:
    """Compare files by digest: media, prepared datasets, conversations."""
    sides = [_files(one) for one in (a, b)]
    for what in dict.fromkeys(name for one in sides for name in one):
        first, second = (one.get(what, "none") for one in sides)
        yield Data(what, first, second, first == second)


def _files(plan: AnyPlan) -> dict[str, str]:
    found = {"media trained on": plan.data_digest[:12], "held-out media": plan.held_out_digest[:12]}
    found |= {
        f"dataset {one.dataset}": f"snapshot {one.number}, {one.items} items, {one.digest[:12]}"
        for one in plan.snapshots
    }
    if (kind := kinds.of(plan)) is not None:
        found |= kind.data(plan)
    return {name: words for name, words in found.items() if words}
