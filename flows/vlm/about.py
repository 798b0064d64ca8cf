"""Description of a run that fine-tunes a VLM: rows of a name and a value."""

import json

from flows.planning.facts import name_of_model
from flows.planning.kinds import Rows
from flows.vlm.plan import VlmPlan


def about(plan: VlmPlan) -> Rows:
    """Return rows on model, data and training of a plan, for people."""
    recipe, model = plan.recipe, plan.model
    lora, train = recipe.policy.lora, recipe.train
    weights = f"LoRA of rank {lora.r}, alpha {lora.lora_alpha:g}" if lora else "all weights"
    conversations = ", ".join(f"{name} {count}" for name, count in plan.conversations.items())
    held_out = ", ".join(f"{name} {count}" for name, count in plan.held_out_conversations.items())
    rows = {
        "model": f"{name_of_model(model.path)} ({model.adapter}), files {model.digest[:12]}",
        "trained weights": f"{weights} of {', '.join(recipe.policy.trains)}",
        "algorithm": train.train_policy.type,
        "seed": str(train.seed),
        "conversations": conversations,
        "held out": held_out,
        "iteration": f"{train.train_policy.steps_per_iteration} steps x {train.train_batch_per_replica} conversations",
        "learning rate": f"{train.optm_lr:g}, {train.optm_name}",
    }
    return tuple((name, value) for name, value in rows.items() if value)


def data(plan: VlmPlan) -> dict[str, str]:
    """Return the numbers of conversations of each dataset as JSON, of the training and of the held-out datasets."""
    return {
        "conversations": json.dumps(plan.conversations),
        "held-out conversations": json.dumps(plan.held_out_conversations),
    }
