"""What a run will write, before it starts."""

from cosmos_rl_core import pipelines, plugins, sizes
from cosmos_rl_core.algorithms._base import Algorithm, trained_steps
from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.sampling.solvers import planned_kernel

GB = 10**9


def sample_bytes(recipe: Recipe) -> int | None:
    """Most bytes of tensors that a rollout stores of one sample, without its picture; None if nobody can tell yet.

    Raises :class:`ConfigError` for a size that the model cannot do.
    """
    diffusers = recipe.policy.diffusers
    path = pipelines.resolve_path(recipe.policy.model_name_or_path)
    elements = sizes.latent_elements(path, diffusers.inference_size, diffusers.train_frames)
    if elements is None:
        return None
    kernel, train_on = planned_kernel(diffusers.sample.rollout), _algorithm(recipe).train_on
    if train_on:
        trained_steps(train_on, len(kernel.steps), kernel.trainable)
    # A random step has neighbours that are stored or not: two states and a look back are the most that it can need.
    steps, num_random = [step for step in train_on if step != -1], train_on.count(-1)
    states = min(len({*steps, *(step + 1 for step in steps)}) + 2 * num_random, len(kernel.steps) + 1)
    looks_back = any(step.recall != 0 for step in kernel.steps)
    history = sum(kernel.steps[step].recall != 0 for step in steps) + num_random * looks_back
    return sizes.FLOAT32_BYTES * elements * (1 + states + history)


def policy_bytes(recipe: Recipe) -> int:
    """Bytes of one policy version: current weights, copies, and two moments of the optimizer, all float32.

    Raises :class:`ConfigError` for a LoRA target that the model does not have.
    """
    path = pipelines.resolve_path(recipe.policy.model_name_or_path)
    elements = sizes.trainable_elements(sizes.weight_shapes(path), recipe.policy.lora)
    algorithm = _algorithm(recipe)
    has_old, has_reference = algorithm.old_decay(0) is not None, algorithm.reference_after(0) != "base"
    return sizes.FLOAT32_BYTES * elements * (3 + has_old + has_reference + recipe.train.ema_enable)


def check_budget(recipe: Recipe) -> None:
    """Raise :class:`ConfigError` if the rollouts would be more than the recipe allows."""
    each = sample_bytes(recipe)
    if each is None or not recipe.train.train_policy.rewarded:
        return
    count = recipe.train.num_iterations * recipe.train.train_batch_per_replica
    if each * count > recipe.rollout.store_budget_gb * GB:
        raise ConfigError(
            f"the rollouts would take {each * count / GB:.2g} GB ({count} samples of {each / 10**6:.1f} MB), more than "
            f"rollout.store_budget_gb = {recipe.rollout.store_budget_gb:g}; raise it, or train on fewer steps"
        )


def embedding_bytes(recipe: Recipe) -> int | None:
    """Bytes stored of the text embedding of one prompt; None for a model of which nobody can tell."""
    path = pipelines.resolve_path(recipe.policy.model_name_or_path)
    elements = sizes.embedding_elements(path, recipe.policy.diffusers.max_prompt_length, recipe.policy.lora)
    return None if elements is None else sizes.FLOAT32_BYTES * elements


def check_embeddings(recipe: Recipe, num_prompts: int) -> None:
    """Raise :class:`ConfigError` if the text embeddings of so many prompts would be more than the recipe allows."""
    each = embedding_bytes(recipe)
    if each is not None and each * num_prompts > recipe.rollout.store_budget_gb * GB:
        raise ConfigError(
            f"the text embeddings would take {each * num_prompts / GB:.2g} GB ({num_prompts} prompts of "
            f"{each / 10**6:.2f} MB), more than rollout.store_budget_gb = {recipe.rollout.store_budget_gb:g}; raise it "
            "or take fewer prompts"
        )


def describe(recipe: Recipe) -> str:
    """In words."""
    words = [f"{recipe.train.num_iterations} policies of {policy_bytes(recipe) / 10**6:.1f} MB"]
    each = sample_bytes(recipe)
    if recipe.train.train_policy.rewarded and each is not None:
        count = recipe.train.num_iterations * recipe.train.train_batch_per_replica
        words.insert(0, f"{count} samples of {each / 1000:.0f} kB and a picture each ({each * count / GB:.1f} GB)")
    if (each := embedding_bytes(recipe)) is not None:
        words.append(f"embeddings of {each / 10**6:.1f} MB a prompt")
    return ", ".join(words)


def _algorithm(recipe: Recipe) -> Algorithm:
    options = recipe.train.train_policy
    return plugins.load("algorithms", options.type).Algorithm(options)
