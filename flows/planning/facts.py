"""Descriptions of a plan for people: rows of a name and a value."""

import json
from collections.abc import Iterator
from typing import Any

from flows.planning import kinds
from flows.planning.base import AnyPlan
from flows.planning.kinds import Rows
from flows.planning.plan import Plan


def about(plan: AnyPlan) -> Rows:
    """Return rows on model, algorithm, data and rewards of a plan. Equal plans give equal rows, without local paths."""
    if (kind := kinds.of(plan)) is not None:
        return kind.about(plan)
    assert isinstance(plan, Plan)
    recipe, model = plan.recipe, plan.model
    lora, sample = recipe.policy.lora, recipe.policy.diffusers.sample
    height, width = plan.media.size
    frames = f", {plan.media.frames} frames" if plan.media.frames > 1 else ""
    rows = {
        "model": f"{name_of_model(model.path)} ({model.adapter}), files {model.digest[:12]}",
        "trained weights": f"LoRA of rank {lora.r}, alpha {lora.lora_alpha:g}" if lora else "all weights",
        "begins with": plan.lineage,
        "algorithm": recipe.train.train_policy.type,
        "seed": str(recipe.train.seed),
        "samples": f"{height} x {width} pixels{frames}, guidance {sample.guidance_scale:g}",
        "prompts": f"{plan.num_prompts} to train on, {len(plan.validation_prompts)} held out",
        "learning rate": f"{recipe.train.optm_lr:g}, {recipe.train.optm_name}",
    }
    if recipe.train.train_policy.rewarded:
        rows["iteration"] = f"{recipe.prompts_per_iteration} prompts x {recipe.rollout.n_generation} samples"
        rewards = (f"{r.fn.label} ({r.role}{f', weight {r.weight:g}' * (r.role == 'train')})" for r in recipe.rewards)
        rows["rewards"] = ", ".join(rewards)
    return tuple((name, value) for name, value in rows.items() if value)


def settings(plan: AnyPlan, *, identity: bool) -> Rows:
    """Return the settings of the recipe that differ from their defaults, sorted by name.

    Sorted, because a plan that was read has the keys of free tables in another order than its recipe.
    With ``identity`` only settings that decide the result: no machines, numbers of kept files or logging.
    """
    decides = dict(flat(plan.recipe.identity()))
    changed = flat(plan.recipe.model_dump(mode="json", exclude_defaults=True))
    return tuple(sorted((name, json.dumps(value)) for name, value in changed if not identity or name in decides))


def roles(plan: AnyPlan) -> dict[str, str]:
    """Return the role in training of each reward of the recipe."""
    return {reward.fn.label: reward.role for reward in plan.recipe.rewards}


def name_of_model(path: str) -> str:
    """Return the last folder of a local path; a model's name as it is."""
    return path.rstrip("/").rpartition("/")[2] if path.startswith(("/", ".", "~")) else path


def flat(values: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the plain values in nested tables with their dotted names, which count the tables of a list from 0."""
    if isinstance(values, dict):
        items = values.items()
    elif isinstance(values, list) and any(isinstance(value, dict) for value in values):
        items = enumerate(values)
    else:
        yield where, values
        return
    for name, value in items:
        yield from flat(value, f"{where}.{name}".lstrip("."))
