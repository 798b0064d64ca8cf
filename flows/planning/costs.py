"""Bytes that a run will write, and numbers that it trains."""

import math
from typing import Literal

from cosmos_rl_core.algorithms._base import algorithm_of
from cosmos_rl_core.algorithms._needs import Needs, trained_steps
from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.pipelines import directories, sizes
from cosmos_rl_core.sampling.solvers import planned_kernel
from cosmos_rl_core.weights.parts import CURRENT, EMA, OLD, OPTIMIZER, REFERENCE

GB = 10**9


def sample_bytes(recipe: Recipe) -> int | None:
    """Return the most bytes of tensors that a rollout stores of a sample; None if no config states the latents' shape.

    Raises :class:`ConfigError` for a size that the model cannot generate.
    """
    diffusers = recipe.policy.diffusers
    path = directories.resolve_path(recipe.policy.model_name_or_path)
    elements = sizes.latent_elements(path, diffusers.inference_size, diffusers.train_frames)
    if elements is None:
        return None
    kernel, train_on = planned_kernel(diffusers.sample.rollout), needs_of(recipe).train_on
    if train_on:
        trained_steps(train_on, len(kernel.steps), kernel.trainable)
    # A random step stores at most two states and one look back; its neighbours may store them too.
    steps, num_random = [step for step in train_on if step != -1], train_on.count(-1)
    states = min(len({*steps, *(step + 1 for step in steps)}) + 2 * num_random, len(kernel.steps) + 1)
    looks_back = any(step.recall != 0 for step in kernel.steps)
    history = sum(kernel.steps[step].recall != 0 for step in steps) + num_random * looks_back
    return sizes.FLOAT32_BYTES * elements * (1 + states + history)


def embedding_bytes(recipe: Recipe) -> int:
    """Return the bytes of the text embedding of one prompt, without masks."""
    path = directories.resolve_path(recipe.policy.model_name_or_path)
    elements = sizes.embedding_elements(path, recipe.policy.diffusers.max_prompt_length, recipe.policy.lora)
    return sizes.FLOAT32_BYTES * elements


def policy_parts(recipe: Recipe) -> dict[str, int]:
    """Return the bytes of each part of a policy version after the first: float32 weights, copies and two moments.

    Raises :class:`ConfigError` for a LoRA target that the model does not have.
    """
    size, needs = sizes.FLOAT32_BYTES * parameters(recipe)[1], needs_of(recipe)
    parts = {
        CURRENT: size,
        OLD: size if needs.old_decay is not None else 0,
        EMA: size if recipe.train.ema_enable else 0,
        REFERENCE: size if reference_after(recipe, 0) != "base" else 0,
        OPTIMIZER: 2 * size,
    }
    return {part: number for part, number in parts.items() if number}


def reference_after(recipe: Recipe, iteration: int) -> Literal["base", "kept", "renewed"]:
    """Return where the reference of the policy after ``iteration`` comes from.

    A policy that is trained from scratch keeps its first version for this; the files of the base do not hold it.
    """
    needs = needs_of(recipe)
    after = needs.reference_after(iteration)
    carries = recipe.policy.from_scratch and REFERENCE in needs.roles
    return "kept" if after == "base" and carries else after


def check_budget(recipe: Recipe) -> None:
    """Raise :class:`ConfigError` if the rollouts exceed ``rollout.store_budget_gb``."""
    each = sample_bytes(recipe)
    if each is None or not recipe.train.train_policy.rewarded:
        return
    count = _kept_rollouts(recipe) * recipe.train.train_batch_per_replica
    if each * count > recipe.rollout.store_budget_gb * GB:
        raise ConfigError(
            f"the rollouts would take {each * count / GB:.2g} GB ({count} samples of {each / 10**6:.1f} MB), more than "
            f"rollout.store_budget_gb = {recipe.rollout.store_budget_gb:g}; raise it, keep fewer "
            "rollouts (rollout.keep.tensors), or train on fewer steps"
        )


def parameters(recipe: Recipe) -> tuple[int, int]:
    """Return how many numbers the transformer has without adapters, and how many train."""
    shapes = sizes.weight_shapes(directories.resolve_path(recipe.policy.model_name_or_path))
    return sizes.trainable_elements(shapes, None), sizes.trainable_elements(shapes, recipe.policy.lora)


def check_embeddings(recipe: Recipe, num_prompts: int) -> None:
    """Raise :class:`ConfigError` if the text embeddings of the prompts exceed ``rollout.store_budget_gb``."""
    each = embedding_bytes(recipe)
    if each * num_prompts > recipe.rollout.store_budget_gb * GB:
        raise ConfigError(
            f"the text embeddings would take {each * num_prompts / GB:.2g} GB ({num_prompts} prompts of "
            f"{each / 10**6:.2f} MB), more than rollout.store_budget_gb = {recipe.rollout.store_budget_gb:g}; raise it "
            "or take fewer prompts"
        )


def in_words(size: int) -> str:
    """Return bytes with three digits, in the largest unit that fits."""
    unit, name = next(((u, n) for u, n in _UNITS if size >= u), (1, "bytes"))
    return f"{size / unit:.3g} {name}" if size < 1000 * unit else f"{size / unit:.0f} {name}"


_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def describe(recipe: Recipe) -> list[str]:
    """Return what an iteration writes and what all of them leave, a line each."""
    parts, iterations = policy_parts(recipe), recipe.train.num_iterations
    of_parts = ", ".join(f"{part} {in_words(size)}" for part, size in parts.items())
    lines = [f"a policy of {in_words(sum(parts.values()))} an iteration: {of_parts}"]
    left = _kept_policies(recipe, parts)
    if recipe.train.train_policy.rewarded:
        each, count, diffusers = sample_bytes(recipe), recipe.train.train_batch_per_replica, recipe.policy.diffusers
        picture = in_words(3 * diffusers.train_frames * math.prod(diffusers.inference_size))
        size = "a size that no file states" if each is None else in_words(each)
        lines.insert(0, f"{count} samples of {size} an iteration, each with a picture of {picture} before compression")
        left += _kept_rollouts(recipe) * count * (each or 0)
    texts = f"; embeddings of {in_words(embedding_bytes(recipe))} a prompt"
    return [*lines, f"{in_words(left)} and the pictures in {iterations} iterations{texts}"]


def _kept_rollouts(recipe: Recipe) -> int:
    """Return the number of rollouts whose tensors are in the store at the same time, at most.

    One more than are kept: the oldest goes when an update has read the newest. A stale rollout is made beside it.
    """
    keep, iterations = recipe.rollout.keep.tensors, recipe.train.num_iterations
    return iterations if keep is None else min(iterations, keep + 1 + (recipe.train.staleness > 0))


def _kept_policies(recipe: Recipe, parts: dict[str, int]) -> int:
    """Return the bytes of all versions. Those older than ``max_keep`` keep only their weights and moving average."""
    iterations = recipe.train.num_iterations
    whole = min(iterations, recipe.train.ckpt.max_keep or iterations)
    return whole * sum(parts.values()) + (iterations - whole) * (parts[CURRENT] + parts.get(EMA, 0))


def needs_data(recipe: Recipe) -> bool:
    """Return whether rollouts or updates read encoded media. Supervised training encodes media when it draws them."""
    policy = recipe.train.train_policy
    return needs_of(recipe).data_term is not None or (policy.rewarded and policy.given_frames[1] > 0)


def needs_of(recipe: Recipe) -> Needs:
    """Return what the recipe's algorithm needs. Raises :class:`ConfigError` if a plugin from outside fails."""
    return algorithm_of(recipe.train.train_policy).needs
