"""Memory of activations and of the VAE in each stage, counted by passes of the recipe's batches without weights."""

import math
from collections.abc import Iterable

from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.config.train import RewardedOptions
from cosmos_rl_core.footprint.counted import footprints
from cosmos_rl_core.footprint.passes import Pass
from cosmos_rl_core.pipelines import sizes
from cosmos_rl_core.pipelines.sizes import Pictures
from cosmos_rl_core.training.forwards import filling
from flows.sizes import costs
from flows.sizes.basis import Basis
from stages.contracts import MediaShape
from stages.generating.plans import vae_batches

TRAINING = ("update", "finetune")


def tile(recipe: Recipe) -> int:
    """Return the number of samples that a rollout denoises at once."""
    return min(recipe.rollout.n_generation_mini_batch, recipe.rollout.samples_per_shard)


def micro_batch(recipe: Recipe, pictures: Pictures) -> int:
    """Return the number of rows of a forward and backward pass: samples, each at one noise level or at several."""
    options, diffusers = recipe.train.train_policy, recipe.policy.diffusers
    if not isinstance(options, RewardedOptions):
        return min(options.mini_batch, recipe.train.train_batch_per_replica)
    needs = costs.needs_of(recipe)
    samples, levels = filling(
        options,
        needs.num_times(diffusers.sample.num_steps),
        lambda: sizes.num_tokens(costs.base_path(recipe), diffusers.inference_size, diffusers.train_frames, pictures),
        members=needs.members,
    )
    return min(samples, costs.step_samples(recipe, options)) * levels


def peaks(recipe: Recipe, kinds: Iterable[str], basis: Basis) -> dict[str, tuple[int, int]]:
    """Return, by stage, the bytes of a rank's activations in the transformer and in the VAE. Stages without are absent.

    Activations are divided evenly among context-parallel ranks, though a few tensors of a transformer are whole on
    each. The activations of text encoders, which take one text at a time, are left out.
    """
    asked = {kind: passes(recipe, kind, basis) for kind in kinds}
    every = [one for found in asked.values() for one in found if one is not None]
    counted = iter(footprints(costs.base_path(recipe), every))
    found: dict[str, tuple[int, int]] = {}
    for kind, (transformer, vae) in asked.items():
        peers = recipe.launch.parallelism_of(kind).cp_size
        at_work = 0 if transformer is None else -(-next(counted).peak_bytes // peers)
        by_vae = 0 if vae is None else next(counted).peak_bytes
        if at_work or by_vae:
            found[kind] = at_work, by_vae
    return found


def passes(recipe: Recipe, kind: str, basis: Basis) -> tuple[Pass | None, Pass | None]:
    """Return the largest pass of a stage through the transformer, and through the VAE; None if it has none."""
    diffusers, validation = recipe.policy.diffusers, recipe.validation
    half, guided = recipe.train.param_dtype == "bfloat16", diffusers.sample.guidance_scale != 1
    media = {"size": diffusers.inference_size, "frames": diffusers.train_frames}

    def forward(batch: int, *, guided: bool) -> Pass:
        length = diffusers.max_prompt_length
        texts = {"max_prompt_length": length, "pictures": basis.pictures}
        return Pass(kind="forward", batch=batch, half=half, guided=guided, **texts, **media)

    def decoding(batch: int) -> Pass:
        (first, *_) = vae_batches(batch, MediaShape(**media))
        return Pass(kind="decoding", batch=len(range(batch)[first]), **media)

    if kind in TRAINING:
        trains = {
            "kind": "training",
            "guided": guided and kind == "update",
            "trains_unconditional": costs.needs_of(recipe).trains_unconditional if kind == "update" else True,
            "checkpointing": recipe.policy.model_gradient_checkpointing is True,
            "lora": recipe.policy.lora,
            "below": basis.below,
        }
        return forward(micro_batch(recipe, basis.pictures), guided=guided).model_copy(update=trains), None
    if kind == "rollout":
        return forward(tile(recipe), guided=guided), decoding(tile(recipe))
    if kind == "validate" and validation is not None:
        return forward(validation.batch_size, guided=False), None
    if kind == "evaluate" and validation is not None:
        # The stock pipeline makes both predictions of a batch at once.
        return forward(validation.batch_size * (1 + guided), guided=False), decoding(validation.batch_size)
    if kind == "decode":
        return None, decoding(tile(recipe))
    if kind == "embed" and basis.pictures:
        return None, _embedding(recipe, basis.pictures)
    if kind == "encode":
        return None, Pass(kind="encoding", batch=1, **media)
    return None, None


def _embedding(recipe: Recipe, pictures: Pictures) -> Pass:
    """Return the largest pass of the VAE over a reference: at the size of its tokens, else at the media's own."""
    path, diffusers = costs.base_path(recipe), recipe.policy.diffusers
    if not (tokens := sizes.reference_tokens(path, pictures)):
        return Pass(kind="encoding", batch=1, size=diffusers.inference_size, frames=diffusers.train_frames)
    (height, width), (_, rows, columns) = sizes.multiples(path), max(tokens, key=math.prod)
    return Pass(kind="encoding", batch=1, size=(rows * height, columns * width), frames=1)
