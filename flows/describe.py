"""A plan in words, for people who want to know before they run."""

from collections.abc import Iterator

from rich.table import Table

from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.memory import Bytes
from flows import costs, memory
from flows.plan import Plan, run_url


def describe_plan(plan: Plan, store_url: str) -> str:
    """What a run would do, and how much of it."""
    recipe = plan.recipe
    train, sample = recipe.train, recipe.policy.diffusers.sample
    weights = f"LoRA of rank {recipe.policy.lora.r}" if recipe.policy.lora else "all weights"
    lines = [
        f"run        {plan.run_id}",
        f"store      {run_url(store_url, plan.run_id)}",
        f"model      {plan.model.path} ({plan.model.adapter}, {plan.model.digest[:12]}), {weights}",
        f"algorithm  {train.train_policy.type}, {train.num_iterations} iterations, seed {train.seed}",
        f"prompts    {len(plan.prompts)} to train on, {len(plan.validation_prompts)} held out",
    ]
    if train.train_policy.rewarded:
        rewards = ", ".join(f"{r.fn.label} ({r.role}, weight {r.weight:g})" for r in recipe.rewards)
        batch = f"{recipe.prompts_per_iteration} prompts x {recipe.rollout.n_generation} samples"
        lines += [
            f"iteration  {batch}, {sample.num_steps} {sample.solver} steps, guidance {sample.guidance_scale:g}",
            f"rewards    {rewards}",
        ]
    lines.append(f"writes     {costs.describe(recipe)}")
    launch = recipe.launch
    lines.append(f"launch     {launch.mode}, {launch.processes} processes, {launch.threads} threads each")
    return "\n".join(lines)


def describe_memory(recipe: Recipe) -> Iterator[str | Table]:
    """What a rank of each stage holds, a column a stage; then the largest of them, and what an iteration writes."""
    total, trained = costs.parameters(recipe)
    yield f"\ntransformer of {_count(total)} parameters, of which {_count(trained)} train"
    found = memory.stages(recipe)
    table = Table(box=None, pad_edge=False, header_style="bold", caption=_CAPTION, caption_justify="left")
    table.add_column("memory of a rank")
    for stage in found:
        table.add_column(stage.stage, justify="right")
    table.add_row("ranks", *(str(stage.ranks) for stage in found))
    for row in memory.ROWS:
        cells = [_cell(stage.rows.get(row, Bytes())) for stage in found]
        if any(cells):
            table.add_row(row, *cells)
    table.add_row("together", *(_cell(stage.peak) for stage in found), style="bold")
    yield table
    yield f"largest stage: {_largest(memory.largest(found))}"
    yield f"each iteration writes {costs.describe_iteration(recipe)}"


_CAPTION = """\
a + b: on the device that computes + in the CPU's memory beside it; ?: no file says; together: with activations and \
weights at work, or the optimizer step, whichever is more. Activations are within a factor of 1.7 of what was measured. \
Not in it: what the VAE, the text encoders and a safety checker make as they work, and what CUDA takes."""


def _largest(stage: memory.StageMemory) -> str:
    copies = f", copies {', '.join(stage.parts)}" if stage.parts else ""
    at_least = "at least " if None in stage.rows.values() else ""
    cpu = f" and {costs.in_words(stage.peak.cpu)} of the CPU's memory" if stage.peak.cpu else ""
    return f"{stage.stage}, {at_least}{costs.in_words(stage.peak.device)}{cpu} a rank{copies}"


def _cell(held: Bytes | None) -> str:
    if held is None:
        return "?"
    device, cpu = (costs.in_words(size) if size else "" for size in (held.device, held.cpu))
    return f"{device} + {cpu}".strip() if cpu else device


def _count(number: int) -> str:
    unit, name = next(((u, n) for u, n in ((10**9, " billion"), (10**6, " million")) if number >= u), (1, ""))
    return f"{number / unit:.4g}{name}"
