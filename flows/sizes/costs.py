"""Bytes that a run will write, and the number of parameters that it trains."""

import math
from collections.abc import Callable
from typing import Literal

from cosmos_rl_core.algorithms._base import algorithm_of
from cosmos_rl_core.algorithms._needs import Needs, trained_steps
from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.config.train import RewardedOptions
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.pipelines import directories, sizes
from cosmos_rl_core.pipelines.sizes import Pictures
from cosmos_rl_core.sampling.kernel import Kernel
from cosmos_rl_core.sampling.solvers import planned_kernel
from cosmos_rl_core.weights.parts import CURRENT, EMA, OLD, OPTIMIZER, REFERENCE
from cosmos_rl_core.weights.shapes import embedding_elements, trainable_elements, weight_shapes

GB = 10**9
TOGETHER = 256
"""Largest number of prompts that the first stage ``embed`` takes, unless one iteration has more."""
LARGEST = 16
"""Largest ratio of the prompts of a later stage ``embed`` to the prompts of the first."""
MIN_PARAMETERS = 10**8
"""Number of a transformer's parameters below which neither its arithmetic nor its activations are worth counting."""


def base_path(recipe: Recipe) -> str:
    """Return the local directory of the base model. Raises :class:`ConfigError` if there is none."""
    return directories.resolve_path(recipe.policy.model_name_or_path)


def sample_bytes(recipe: Recipe) -> int:
    """Return the largest number of bytes that a rollout stores for the tensors of one sample, in any iteration.

    Raises :class:`ConfigError` for a size that the model cannot generate.
    """
    path, diffusers = base_path(recipe), recipe.policy.diffusers
    elements = sizes.latent_elements(path, diffusers.inference_size, diffusers.train_frames)
    kernel, needs = planned_kernel(diffusers.sample.rollout), needs_of(recipe)
    every = dict.fromkeys(needs.steps_at(k) for k in range(recipe.train.num_iterations))
    return sizes.FLOAT32_BYTES * elements * (1 + max(_states(kernel, train_on) for train_on in every))


def _states(kernel: Kernel, train_on: tuple[int, ...]) -> int:
    """Return the largest number of states, and of earlier estimates that a step reads, stored for one sample."""
    if train_on:
        trained_steps(train_on, kernel.trainable)
    # A random step stores at most two states and one look back; its neighbours may store them too.
    steps, num_random = [step for step in train_on if step != -1], train_on.count(-1)
    known = {*steps, *(step + 1 for step in steps)}
    states = min(len(known) + 2 * num_random, len(kernel.steps) + 1)
    looks_back = any(step.recall != 0 for step in kernel.steps)
    return states + sum(kernel.steps[step].recall != 0 for step in steps) + num_random * looks_back


def pixel_bytes(recipe: Recipe) -> int:
    """Return the bytes of a sample's pixels before compression."""
    diffusers = recipe.policy.diffusers
    return 3 * diffusers.train_frames * math.prod(diffusers.inference_size)


def text_bytes(recipe: Recipe) -> int:
    """Return the bytes of the text embedding of one prompt, without masks."""
    policy = recipe.policy
    length = policy.diffusers.max_prompt_length
    return sizes.FLOAT32_BYTES * embedding_elements(base_path(recipe), length, policy.lora)


def reference_bytes(recipe: Recipe, pictures: Pictures) -> int:
    """Return the bytes that references of these sizes add to the conditioning of a prompt."""
    diffusers = recipe.policy.diffusers
    shapes = sizes.reference_shapes(base_path(recipe), pictures, diffusers.inference_size, diffusers.train_frames)
    return sizes.FLOAT32_BYTES * sum(map(math.prod, shapes.values()))


def embedding_bytes(recipe: Recipe, pictures: Pictures = ()) -> int:
    """Return the bytes that are stored for one prompt with references of these sizes, without masks.

    If the model reads texts together with references, a negative and an empty prompt are stored with each prompt.
    """
    takes = directories.spec(base_path(recipe)).references
    texts = 3 if pictures and takes and takes.read_with_text else 1
    return texts * text_bytes(recipe) + reference_bytes(recipe, pictures)


def embedded_together(recipe: Recipe, num_prompts: int, k: int) -> range | None:
    """Return the iterations whose prompts one stage embeds with iteration k's; None if it embeds all prompts.

    Each stage embeds as many iterations as all before it, up to :data:`LARGEST` times the first, so that a run starts
    few stages and embeds at most twice what it needs. The ranges depend neither on the number of iterations nor on the
    budget, so that a run that goes on, or gets more room, keeps its embeddings.
    """
    wanted = recipe.prompts_per_iteration
    if not recipe.train.train_policy.rewarded or num_prompts <= max(wanted, TOGETHER):
        return None
    first = max(1, TOGETHER // wanted)
    size = min(first << max(0, (k // first).bit_length() - 1), first * LARGEST)
    return range(start := k - k % size, start + size)


def embedded_prompts(recipe: Recipe, num_prompts: int) -> int:
    """Return how many of the ``num_prompts`` prompts that a run trains on it embeds, at most."""
    last = embedded_together(recipe, num_prompts, max(0, recipe.train.num_iterations - 1))
    return num_prompts if last is None else min(num_prompts, last.stop * recipe.prompts_per_iteration)


def policy_parts(recipe: Recipe) -> dict[str, int]:
    """Return the bytes of each part of a policy version after the first, in float32: weights, copies, two moments.

    Raises :class:`ConfigError` for a LoRA target that the model does not have.
    """
    size, needs = sizes.FLOAT32_BYTES * parameters(recipe)[1], needs_of(recipe)
    copies = {
        CURRENT: True,
        OLD: needs.old_decay is not None,
        EMA: recipe.train.ema_enable,
        REFERENCE: reference_after(recipe, 0) != "base",
    }
    return {part: size for part, kept in copies.items() if kept} | {OPTIMIZER: 2 * size}


def reference_after(recipe: Recipe, iteration: int) -> Literal["base", "kept", "renewed"]:
    """Return where the reference of the policy after ``iteration`` comes from.

    A policy that is trained from scratch, or compares with its init, keeps its first version as the reference, because
    the files of the base do not hold it.
    """
    needs = needs_of(recipe)
    after = needs.reference_after(iteration)
    is_first = recipe.policy.from_scratch or recipe.policy.reference == "init"
    return "kept" if after == "base" and is_first and REFERENCE in needs.roles else after


def keeps_base(recipe: Recipe) -> bool:
    """Return whether version 0 of a policy that begins with trained weights also holds the base as its reference.

    The loss of an update takes the base from the model's files. Rollouts, and a reference that is renewed later, read
    it as a part of the policy.
    """
    policy, needs = recipe.policy, needs_of(recipe)
    as_part = needs.behaviour == REFERENCE or (REFERENCE in needs.roles and needs.update_ref_every_iter > 0)
    return policy.init_mode == "continue" and policy.reference == "base" and as_part


def check_budget(recipe: Recipe, what: str, count: int, size: Callable[[Recipe], int], advice: str) -> None:
    """Raise :class:`ConfigError` if ``count`` objects of ``size`` exceed ``rollout.store_budget_gb``."""
    each, budget = size(recipe), recipe.rollout.store_budget_gb
    if each * count > budget * GB:
        raise ConfigError(
            f"the {what} would take {each * count / GB:.2g} GB ({count} of {each / 10**6:.2f} MB), "
            f"more than rollout.store_budget_gb = {budget:g}; raise it, or {advice}"
        )


def parameters(recipe: Recipe) -> tuple[int, int]:
    """Return the number of the transformer's parameters without adapters, and the number that train."""
    shapes = weight_shapes(base_path(recipe))
    total, trained = (trainable_elements(shapes, lora) for lora in (None, recipe.policy.lora))
    return total, trained


def is_large(recipe: Recipe) -> bool:
    """Return whether the model is large enough to count its arithmetic and activations, which takes seconds."""
    return parameters(recipe)[0] >= MIN_PARAMETERS


def kept_samples(recipe: Recipe) -> int:
    """Return the largest number of samples whose tensors are in the store at the same time.

    They are of one rollout more than are kept, because the oldest is deleted after an update has read the newest; and
    with staleness of one more, which is made during that update.
    """
    keep, train = recipe.rollout.keep.tensors, recipe.train
    rollouts = train.num_iterations
    if keep is not None:
        rollouts = min(rollouts, keep + 1 + (train.staleness > 0))
    return rollouts * train.train_batch_per_replica


def kept_policy_bytes(recipe: Recipe) -> int:
    """Return the bytes of all policy versions. All but the newest ``max_keep`` keep only weights and moving average."""
    parts, iterations = policy_parts(recipe), recipe.train.num_iterations
    whole = min(iterations, recipe.train.ckpt.max_keep or iterations)
    return whole * sum(parts.values()) + (iterations - whole) * (parts[CURRENT] + parts.get(EMA, 0))


def needs_data(recipe: Recipe) -> bool:
    """Return whether training or rollouts read latents of media."""
    policy = recipe.train.train_policy
    return not policy.rewarded or policy.given_frames[1] > 0 or needs_of(recipe).data_term is not None


def optimizer_steps(recipe: Recipe, options: RewardedOptions) -> int:
    """Return the number of optimizer steps of a pass over a rollout."""
    batch = recipe.train.train_batch_per_replica
    return batch // (options.batch_size_per_optimize or batch)


def most_units(recipe: Recipe) -> int:
    """Return the largest number of units, samples or pairs, that an update trains on in a rollout."""
    return recipe.prompts_per_iteration * needs_of(recipe).most_units(recipe.rollout.n_generation)


def step_samples(recipe: Recipe, options: RewardedOptions) -> int:
    """Return the largest number of samples of an optimizer step. A sample in several pairs counts in each."""
    return math.ceil(most_units(recipe) / optimizer_steps(recipe, options)) * needs_of(recipe).members


def needs_of(recipe: Recipe) -> Needs:
    """Return the needs of the recipe's algorithm. Raises :class:`ConfigError` if a plugin from outside fails."""
    return algorithm_of(recipe.train.train_policy).needs
