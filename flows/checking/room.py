"""The fit of a rank's memory to its device, and the settings that make it fit."""

from collections.abc import Iterator
from typing import Any

from cosmos_rl_core.config.base import Section
from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.errors import ConfigError, Mistakes
from cosmos_rl_core.pipelines import directories
from flows.checking.checks import stages_of
from flows.sizes import costs, memory
from flows.sizes.activations import TRAINING
from flows.sizes.basis import Basis

GIB = 2**30
CHECKPOINTING = "policy.model_gradient_checkpointing"
POLICY = "train.train_policy"
BATCHES: dict[str, str] = {
    **dict.fromkeys(TRAINING, f"{POLICY}.mini_batch"),
    "rollout": "rollout.n_generation_mini_batch",
    **dict.fromkeys(("validate", "evaluate"), "validation.batch_size"),
}
"""For each stage, the setting of the number of samples that it computes at once."""

Change = tuple[str, Any]
"""Dotted name of a setting, and a value."""


def settled(recipe: Recipe, checkpointing: bool | None) -> Recipe:
    """Return the recipe with the decision on recomputing activations in place of ``"auto"``."""
    if recipe.policy.model_gradient_checkpointing != "auto":
        return recipe
    return changed(recipe, (CHECKPOINTING, bool(checkpointing)))


def decide(recipe: Recipe, basis: Basis, mistakes: Mistakes) -> bool | None:
    """Return what :func:`checkpointing` decides, and add a mistake for each stage that does not fit even so."""
    decided = mistakes.catch(checkpointing, recipe, basis)
    mistakes.extend(mistakes.catch(misfits, settled(recipe, decided), basis) or ())
    return decided


def checkpointing(recipe: Recipe, basis: Basis) -> bool | None:
    """Return whether training recomputes activations; None if the recipe says it itself.

    It does, unless training is known to fit the devices without it. Small models always fit.
    """
    if recipe.policy.model_gradient_checkpointing != "auto":
        return None
    trains = [stage for stage in stages_of(recipe) if stage in TRAINING]
    if costs.is_large(recipe) and any(recipe.launch.device_memory_of(stage) is None for stage in trains):
        return True
    without = changed(recipe, (CHECKPOINTING, False))
    return any(_excess(without, stage, basis) for stage in trains)


def misfits(recipe: Recipe, basis: Basis) -> list[str]:
    """Return a message for each stage that needs more memory than its devices have, with settings that make it fit."""
    return [
        f"{found}; {_advice(recipe, stage, basis)}"
        for stage in stages_of(recipe)
        if (found := _excess(recipe, stage, basis))
    ]


def _excess(recipe: Recipe, stage: str, basis: Basis) -> str:
    """Return a sentence on the memory that a stage needs and its devices lack; "" if it fits or that is unknown."""
    limit = recipe.launch.device_memory_of(stage)
    if limit is None or stage not in memory.LOADING or not costs.is_large(recipe):
        return ""
    (found,) = memory.stages(recipe, [stage], basis, activations=True)
    if found.peak.device <= limit * GIB:
        return ""
    largest = sorted(found.rows_at(found.moment).items(), key=lambda row: -row[1].device)[:3]
    rows = ", ".join(f"{name} {held.device / GIB:.1f}" for name, held in largest)
    needs = f"{stage} needs {found.peak.device / GIB:.1f} GiB on a device of {limit:g} GiB"
    return f"{needs} ({found.moment}: {rows}, ...)"


def _advice(recipe: Recipe, stage: str, basis: Basis) -> str:
    """Return a sentence with the first setting that makes a stage fit, else the first settings that do together."""
    alone = [[change] for change in _changes(recipe, stage)]
    last = dict(_changes(recipe, stage))
    together = [[*last.items()][: count + 1] for count in range(1, len(last))]
    for changes in [*alone, *together]:
        try:
            fits = _fits(changed(recipe, *changes), stage, basis)
        except ConfigError:
            # The ranks cannot be divided in this way.
            continue
        if fits:
            return "it fits with " + " and ".join(f"{name} = {_toml(value)}" for name, value in changes)
    return "no setting here makes it fit: take devices with more memory, or more of them"


def _fits(recipe: Recipe, stage: str, basis: Basis) -> bool:
    """Return whether a stage fits. Activations take seconds to count, so a stage too large without them is not."""
    limit = recipe.launch.device_memory_of(stage)
    (held,) = memory.stages(recipe, [stage], basis)
    return limit is not None and held.peak.device <= limit * GIB and not _excess(recipe, stage, basis)


def _changes(recipe: Recipe, stage: str) -> Iterator[Change]:
    """Yield settings that lower the memory of a stage, from the cheapest to the most expensive."""
    if recipe.launch.kept_bytes:
        yield "launch.resident_gb", 0
    if stage in TRAINING and recipe.policy.model_gradient_checkpointing is not True:
        yield CHECKPOINTING, True
    if (name := _batch(recipe, stage)) is not None:
        # A forward pass of an update takes whole pairs.
        size, members = _value(recipe, name), costs.needs_of(recipe).members if stage == "update" else 1
        while (size := size // 2 // members * members) >= 1:
            yield name, size
    if stage not in (*TRAINING, "rollout", "validate"):
        return
    if recipe.train.param_dtype == "float32":
        yield "train.param_dtype", "bfloat16"
    launch, ranks = recipe.launch, recipe.launch.processes_of(stage)
    yield from (("launch.dp_shard_size", n) for n in _divisors(ranks) if n > launch.dp_shard_size)
    if directories.spec(costs.base_path(recipe)).context_parallel:
        yield from (("launch.cp_size", n) for n in _divisors(ranks) if n > launch.cp_size)
    if launch.dp_shard_size > 1 and not launch.fsdp_offload:
        yield "launch.fsdp_offload", True


def _batch(recipe: Recipe, stage: str) -> str | None:
    """Return the setting that decides how many samples are in memory at once."""
    by_tokens = getattr(recipe.train.train_policy, "tokens_per_forward", None) is not None
    return f"{POLICY}.tokens_per_forward" if stage == "update" and by_tokens else BATCHES.get(stage)


def _divisors(number: int) -> list[int]:
    return [n for n in range(2, number + 1) if number % n == 0]


def _value(recipe: Recipe, name: str) -> Any:
    value: Any = recipe
    for part in name.split("."):
        value = getattr(value, part)
    return value


def changed(recipe: Recipe, *changes: Change) -> Recipe:
    """Return the recipe with other values of settings, given by their dotted names."""
    for name, value in changes:
        recipe = _with(recipe, name.split("."), value)
    return recipe


def _with(section: Any, path: list[str], value: Any) -> Any:
    first, *rest = path
    assert isinstance(section, Section)
    assert first in type(section).model_fields, first
    inner = _with(getattr(section, first), rest, value) if rest else value
    return section.model_copy(update={first: inner})


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
