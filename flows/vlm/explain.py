"""Explanation of a plan of a VLM, for people and for scripts."""

from collections import Counter
from dataclasses import asdict
from typing import Any

from cosmos_rl_core.errors import counted
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.weights.shapes import count_elements
from flows.ledger import estimates
from flows.planning.plan import run_url
from flows.sizes.memory import StageMemory
from flows.vlm import memory
from flows.vlm.plan import VlmPlan
from flows.vlm.run import VlmRun
from flows.vlm.waves import vlm_sft

UNCOUNTED = (
    "Logits are counted as if every token of a row had a label. Activations are not counted, nor files in transit, nor "
    "CUDA itself: leave room."
)


def explained(plan: VlmPlan, store_url: str, named_by: str = "") -> str:
    """Return what a run would do, one line per subject. ``named_by`` says where the store was named."""
    recipe, train, launch = plan.recipe, plan.recipe.train, plan.recipe.launch
    options, stages = train.train_policy, _stages(plan, store_url)
    files = plan.model.digest[:12] or "not all files are here"
    weights = f"LoRA of rank {recipe.policy.lora.r}" if recipe.policy.lora else "all weights"
    subjects: dict[str, str | list[str]] = {
        "run": plan.run_id,
        "store": run_url(store_url, plan.run_id) + named_by,
        "model": f"{plan.model.path} ({plan.model.adapter}, {files})",
        "trains": f"{weights} of {', '.join(recipe.policy.trains)}{_share(plan)}",
        "algorithm": f"{options.type}, {counted(train.num_iterations, 'iteration')}, seed {train.seed}",
        "iteration": f"{options.steps_per_iteration} steps x {train.train_batch_per_replica} conversations, rows of at "
        f"most {options.row_tokens} tokens",
        "data": _counted(plan.conversations, plan.left_out),
        "passes": f"{plan.epochs:.3g} over these conversations",
        "held out": _counted(plan.held_out_conversations, {}),
        "plugins": [f"{pin.name} of {pin.kind}, {pin.path}" for pin in plan.plugins],
        "stages": f"{stages.total()}: {', '.join(stages)}",
        "launch": f"{launch.mode if launch.launcher == 'local' else launch.launcher}, {launch.processes} processes, "
        f"{launch.threads} threads each",
        "time": like.lines() if (like := estimates.estimate(plan, store_url)) else [],
    }
    if missing := _missing(plan):
        subjects["missing"] = missing
    lines = ((name, [lines] if isinstance(lines, str) else lines) for name, lines in subjects.items())
    return "\n".join(f"{name if i == 0 else '':<10} {line}" for name, some in lines for i, line in enumerate(some))


def with_memory(plan: VlmPlan, store_url: str, named_by: str) -> tuple[str, list[StageMemory], str]:
    """Return a text on what a run would do, the memory of its stages, and what that memory leaves out."""
    return explained(plan, store_url, named_by), memory_of(plan, store_url), UNCOUNTED


def as_json(plan: VlmPlan, store_url: str) -> dict[str, Any]:
    """Return the plan for scripts, with the keys of other plans where they apply.

    ``conversations`` has the number of rows of each dataset, ``passes`` the number of passes over them in training.
    ``parameters`` is null if the model's plugin does not know the shapes of the weights; ``memory`` is then empty.
    """
    like, model = estimates.estimate(plan, store_url), memory.model_of(plan.recipe, plan.model.path)
    return {
        "run": plan.run_id,
        "url": run_url(store_url, plan.run_id),
        "init": plan.lineage,
        "algorithm": plan.recipe.train.train_policy.type,
        "iterations": plan.recipe.train.num_iterations,
        "recipe": plan.recipe.model_dump(mode="json"),
        "model": plan.model.model_dump(include={"path", "adapter", "digest"}),
        "parameters": None
        if model is None
        else {"total": count_elements(model.shapes), "trained": count_elements(model.trained)},
        "conversations": {"train": plan.conversations, "held_out": plan.held_out_conversations},
        "passes": plan.epochs,
        "stages": _stages(plan, store_url),
        "memory": [each.as_json() for each in memory_of(plan, store_url)],
        "time": {"like": None if like is None else asdict(like)},
        "missing": _missing(plan),
    }


def memory_of(plan: VlmPlan, store_url: str) -> list[StageMemory]:
    """Return the memory of the stages with weights."""
    kinds = (step.kind for wave in vlm_sft(VlmRun(plan, store_url)) for step in wave.steps)
    return memory.stages(plan.recipe, plan.model.path, kinds)


def _share(plan: VlmPlan) -> str:
    """Return in words the numbers of trained and of all parameters; "" if the shapes are not known."""
    model = memory.model_of(plan.recipe, plan.model.path)
    return (
        ""
        if model is None
        else f": {count_elements(model.trained):,} parameters; the model has {count_elements(model.shapes):,}"
    )


def _counted(conversations: dict[str, int], left_out: dict[str, int]) -> list[str]:
    def lost(name: str) -> str:
        return f"; {left_out[name]} rows cannot be used, `index` lists them" if left_out.get(name) else ""

    said = "conversations, as far as their texts say"
    return [f"{name}: {count} {said}{lost(name)}" for name, count in conversations.items()]


def _missing(plan: VlmPlan) -> list[str]:
    if plan.model.digest:
        return []
    command = directories.download_command(plan.recipe.policy.model_name_or_path)
    return ["the weights", *([] if command is None else [f"a run needs them: {command}"])]


def _stages(plan: VlmPlan, store_url: str) -> Counter[str]:
    """Return how often each stage runs, by the name that ``rerun`` takes, in the order of the loop."""
    return Counter(step.stage for wave in vlm_sft(VlmRun(plan, store_url)) for step in wave.steps)
