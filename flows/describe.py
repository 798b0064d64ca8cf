"""A plan in words, for people who want to know before they run."""

from flows import costs
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
    how = launch.mode if launch.launcher == "local" else launch.launcher
    lines.append(f"launch     {how}, {launch.processes} processes, {launch.threads} threads each")
    return "\n".join(lines)
