"""What a run will write, before it starts."""

from cosmos_rl_core import pipelines, plugins, sizes
from cosmos_rl_core.algorithms._base import Algorithm, trained_steps
from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.memory import safetensors_bytes
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
    kernel, train_on = planned_kernel(diffusers.sample.rollout), algorithm_of(recipe).train_on
    if train_on:
        trained_steps(train_on, len(kernel.steps), kernel.trainable)
    # A random step has neighbours that are stored or not: two states and a look back are the most that it can need.
    steps, num_random = [step for step in train_on if step != -1], train_on.count(-1)
    states = min(len({*steps, *(step + 1 for step in steps)}) + 2 * num_random, len(kernel.steps) + 1)
    looks_back = any(step.recall != 0 for step in kernel.steps)
    history = sum(kernel.steps[step].recall != 0 for step in steps) + num_random * looks_back
    return sizes.FLOAT32_BYTES * elements * (1 + states + history)


def embedding_bytes(recipe: Recipe) -> int | None:
    """Bytes of the text embedding of one prompt, without masks; None if nobody can tell."""
    path = pipelines.resolve_path(recipe.policy.model_name_or_path)
    elements = sizes.embedding_elements(path, recipe.policy.diffusers.max_prompt_length)
    return None if elements is None else sizes.FLOAT32_BYTES * elements


def policy_bytes(recipe: Recipe) -> int:
    """Bytes of one policy version: current weights, copies, and two moments of the optimizer, all float32.

    Raises :class:`ConfigError` for a LoRA target that the model does not have.
    """
    path = pipelines.resolve_path(recipe.policy.model_name_or_path)
    elements = sizes.trainable_elements(sizes.weight_shapes(path), recipe.policy.lora)
    algorithm = algorithm_of(recipe)
    has_old, has_reference = algorithm.old_decay(0) is not None, algorithm.reference_after(0) != "base"
    return sizes.FLOAT32_BYTES * elements * (3 + has_old + has_reference + recipe.train.ema_enable)


def policy_files(recipe: Recipe) -> dict[str, int]:
    """Bytes of the files of each part of a policy version that a training stage writes, the first aside."""
    path = pipelines.resolve_path(recipe.policy.model_name_or_path)
    shapes = sizes.trainable_shapes(sizes.weight_shapes(path), recipe.policy.lora)
    algorithm = algorithm_of(recipe)
    moments = {f"{moment}.{name}": shape for name, shape in shapes.items() for moment in ("exp_avg", "exp_avg_sq")}
    parts = {
        "current": shapes,
        "old": shapes if algorithm.old_decay(0) is not None else {},
        "ema": shapes if recipe.train.ema_enable else {},
        "reference": shapes if algorithm.reference_after(0) != "base" else {},
        "optimizer": moments | {f"step.{name}": () for name in shapes},
    }
    return {part: safetensors_bytes(tensors) for part, tensors in parts.items() if tensors}


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


def parameters(recipe: Recipe) -> tuple[int, int]:
    """Numbers in the transformer's weights, without adapters, and numbers that train."""
    shapes = sizes.weight_shapes(pipelines.resolve_path(recipe.policy.model_name_or_path))
    return sizes.trainable_elements(shapes, None), sizes.trainable_elements(shapes, recipe.policy.lora)


def in_words(size: int) -> str:
    """Bytes in the largest unit that fits."""
    unit, name = next(((u, n) for u, n in ((GB, "GB"), (10**6, "MB"), (1000, "kB")) if size >= u), (1, "B"))
    return f"{size / unit:.3g} {name}" if size < 1000 * unit else f"{size / unit:.0f} {name}"


def describe_iteration(recipe: Recipe) -> str:
    """Files of one iteration, in words."""
    files, written = policy_files(recipe), []
    if recipe.train.train_policy.rewarded:
        count, each, diffusers = recipe.train.train_batch_per_replica, sample_bytes(recipe), recipe.policy.diffusers
        pixels = 3 * diffusers.train_frames * diffusers.inference_size[0] * diffusers.inference_size[1]
        tensors = "tensors of a size that nobody can tell yet" if each is None else f"tensors of {in_words(each)}"
        written.append(f"a rollout of {count} samples, each {tensors} and a picture of {in_words(pixels)} before compression")
    parts = ", ".join(f"{part} {in_words(size)}" for part, size in files.items())
    return ", ".join([*written, f"a policy of {in_words(sum(files.values()))} ({parts})"])


def describe(recipe: Recipe) -> str:
    """In words."""
    words = [f"{recipe.train.num_iterations} policies of {policy_bytes(recipe) / 10**6:.1f} MB"]
    each = sample_bytes(recipe)
    if recipe.train.train_policy.rewarded and each is not None:
        count = recipe.train.num_iterations * recipe.train.train_batch_per_replica
        words.insert(0, f"{count} samples of {each / 1000:.0f} kB and a picture each ({each * count / GB:.1f} GB)")
    if (each := embedding_bytes(recipe)) is not None:
        words.append(f"embeddings of {in_words(each)} a prompt")
    return ", ".join(words)


def algorithm_of(recipe: Recipe) -> Algorithm:
    options = recipe.train.train_policy
    return plugins.load("algorithms", options.type).Algorithm(options)
