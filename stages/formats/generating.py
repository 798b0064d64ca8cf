"""Writing generated samples: which there will be, how they are divided into units, and how ranks share the units."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cosmos_rl_core import seeds
from cosmos_rl_core.algorithms._needs import trained_steps
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import ConfigError, DivergenceError
from cosmos_rl_core.pipelines.sizes import FLOAT32_BYTES
from cosmos_rl_core.sampling.kernel import Kernel
from cosmos_rl_core.storage import media
from stages.artifacts.layouts import cut, holds
from stages.artifacts.request import Request
from stages.contracts import INDEX, MEDIA, TENSORS, MediaShape, Rollout, Samples
from stages.execution.context import Context
from stages.formats.samples import BY_GUARDRAIL, KB_PER_SAMPLE, REFUSED, StoredSample, unit_files, unit_name

if TYPE_CHECKING:
    from cosmos_rl_core.parallel.distributed import Group

VAE_SAMPLE_BYTES = 32 * 2**20
"""Float32 pixels of a sample beyond which the VAE takes one at a time: a video of 480p from 8 frames on, an image from
2.8 megapixels on. It depends on the sample alone, so that no division of the work changes bits."""


@dataclass(frozen=True)
class SamplePlan:
    """One sample to be generated."""

    sample_id: str
    prompt: Prompt
    member: int
    seed: int
    """All its draws derive from it."""
    noise_seed: int
    """The initial noise derives from it: ``seed``, or one that the samples of a prompt share."""


def plan_samples(
    prompts: tuple[Prompt, ...], n_generation: int, run_seed: int, iteration: int | None, *, same_noise: bool = False
) -> list[SamplePlan]:
    """Return every member of every prompt's group, in order, with its seeds.

    Ids hold the iteration, so that samples of two rollouts never share one. Held-out samples have no iteration: their
    ids and seeds are equal at every policy version.
    """
    plans: list[SamplePlan] = []
    prefix = "" if iteration is None else f"i{iteration:04d}-"
    for prompt in prompts:
        shared = seeds.derive("shared noise", run_seed, iteration or 0, prompt.id)
        for member in range(n_generation):
            seed = seeds.sample_seed(run_seed, iteration or 0, prompt.id, member)
            noise_seed = shared if same_noise else seed
            sample_id = f"{prefix}{prompt.id}-{member:03d}"
            plans.append(SamplePlan(sample_id, prompt, member, seed, noise_seed))
    return plans


def planned(request: Request) -> list[SamplePlan]:
    """Return the samples of a rollout's Request."""
    config, key = request.settings(Rollout), (request.seed, request.iteration or 0)
    return plan_samples(config.prompts, config.n_generation, *key, same_noise=config.use_same_seed)


def recorded_steps(request: Request, kernel: Kernel, prompt_id: str) -> tuple[int, ...]:
    """Return the steps to store of a prompt's samples; a random step is drawn from those with noise."""
    config = request.settings(Rollout)
    if not config.train_on:
        return ()
    key = (request.seed, "trained steps", request.iteration or 0, prompt_id)
    order = seeds.permutation(len(kernel.trainable), *key)
    return trained_steps(config.train_on, [kernel.trainable[i] for i in order])


def grid_facts(kernel: Kernel) -> dict[str, Any]:
    """Return what the index says of a rollout's noise levels: the grid, and the level of each step."""
    return {"sigmas": list(kernel.sigmas), "t": [step.t for step in kernel.steps]}


def row_of(plan: SamplePlan) -> dict[str, Any]:
    """Return what a row of the index says of a planned sample."""
    prompt = plan.prompt
    return vars(plan) | {"prompt_id": prompt.id, "prompt": prompt.text, "metadata": prompt.metadata}


def with_media(
    plan: SamplePlan, pixels: np.ndarray | None, tensors: bytes | None, facts: dict[str, Any], *, refused: bool = False
) -> StoredSample:
    """Return a generated sample with its picture encoded.

    ``pixels`` is uint8 ``[frames, height, width, 3]``, None if the sample is not finite or ``refused`` by a guardrail.
    ``facts`` are added to its row of the index.
    """
    assert not (refused and pixels is not None), "no media of a refused sample are stored"
    row = row_of(plan) | {"finite": pixels is not None} | ({REFUSED: BY_GUARDRAIL} if refused else {}) | facts
    encoded = ("", b"") if pixels is None else media.encode(pixels)
    return StoredSample(row, *encoded, tensors=tensors)


def vae_batches(num_samples: int, shape: MediaShape) -> list[slice]:
    """Return the parts of a batch that the VAE takes at once: the whole batch, or single samples if they are large.

    The VAE's memory grows with the pixels of its batch, and is by far the most of a video's memory.
    """
    sample_bytes = FLOAT32_BYTES * 3 * shape.frames * math.prod(shape.size)
    at_once = num_samples if sample_bytes <= VAE_SAMPLE_BYTES else 1
    return [slice(start, start + at_once) for start in range(0, num_samples, at_once)]


def write_samples(
    context: Context["Group"],
    config: Samples,
    samples: list[SamplePlan],
    generate: Callable[[list[SamplePlan]], list[StoredSample]],
    *,
    tensors: bool,
    accompany: Callable[[list[SamplePlan]], object] | None = None,
) -> dict[str, float]:
    """Write the units of all samples and return their number and mean size. Collective.

    Each rank makes its own units and adopts those that an earlier attempt finished. Context-parallel peers make the
    same units; their leader writes them. ``generate`` makes at most ``batch_size`` samples of one unit; with
    ``tensors`` each has tensors. Under sharded weights every rank must do the same number of forward passes: a rank
    with fewer batches calls ``accompany`` for the rest. Raises :class:`DivergenceError` if no sample is finite, and
    :class:`ConfigError` if a guardrail refuses all that are.
    """
    ranks = context.ranks
    by_id = {sample.sample_id: sample for sample in samples}
    planned = cut(list(by_id), config.samples_per_shard)
    layout = context.layout({"units": planned, "tile": context.shrunk(config.batch_size)})
    units: list[list[str]] = layout["units"]
    tiles = [cut([by_id[sample_id] for sample_id in ids], layout["tile"]) for ids in units]
    parts = (INDEX, MEDIA, TENSORS) if tensors else (INDEX, MEDIA)
    checks = [holds([unit_name(part, n) for part in parts], ids) for n, ids in enumerate(units)]
    numbers = range(ranks.data_rank, len(units), ranks.data_world_size)
    mine = {number: len(units[number]) for number in numbers}
    total = sum(mine.values())

    # Only the leader of the peers looks: peers make the other units together, so all must know the same number.
    found: list[int] = []
    for number in mine if ranks.leads else ():
        context.progress("sampling", sum(mine[one] for one in found), total)
        found += [number] if context.attempt.adopt(number, checks[number]) else []
    adopted = set(ranks.broadcast_to_peers(found))
    to_make = [number for number in mine if number not in adopted]
    num_calls = sum(len(tiles[number]) for number in to_make)
    # Gathered before the first forward pass, which waits for all ranks.
    most_calls = num_calls if accompany is None else max(ranks.gather(num_calls))
    done = sum(mine[number] for number in adopted)
    for number in to_make:
        made: list[StoredSample] = []
        for plans in tiles[number]:
            context.progress("sampling", done, total)
            made += generate(plans)
            done += len(plans)
        if ranks.leads:
            context.attempt.finish(number, unit_files(number, made), checks[number])
        context.progress("sampling", done, total)
    if accompany is not None:
        for call in range(num_calls, most_calls):
            context.progress("sampling beside the other ranks", call, most_calls)
            accompany(tiles[0][0])
    return _summary(context, samples, list(mine) if ranks.leads else [])


def _summary(context: Context["Group"], samples: list[SamplePlan], mine: list[int]) -> dict[str, float]:
    """Count the samples without pixels and the refused ones, and measure the files, of all ranks. Collective."""
    indices = [context.attempt.read(unit_name(INDEX, number)) for number in mine]
    rows = [row for index in indices for row in json.loads(index)]
    nonfinite = sum(context.ranks.gather(sum(not row["finite"] for row in rows)))
    refused = sum(context.ranks.gather(sum(REFUSED in row for row in rows)))
    if refused and nonfinite == len(samples):
        raise ConfigError(
            f"the guardrail refuses all {refused} samples that were decoded, e.g. of the prompt "
            f"{samples[0].prompt.text!r}; take other prompts, or begin again at an earlier policy"
        )
    if nonfinite == len(samples):
        raise DivergenceError(
            f"none of {len(samples)} samples is finite, e.g. {samples[0].sample_id}: the policy, or its precision, is "
            "broken; begin again at an earlier policy, or compute in float32"
        )
    counts = {"samples": len(samples)} | ({"nonfinite": nonfinite} if nonfinite else {})
    counts |= {"refused": refused} if refused else {}
    size = sum(context.ranks.gather(sum(entry.size for entry in context.attempt.files.values())))
    return counts | {KB_PER_SAMPLE: size / len(samples) / 1000}
