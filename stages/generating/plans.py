"""The samples of a rollout or an evaluation: their ids, seeds, recorded steps, and rows of the index."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from cosmos_rl_core import seeds
from cosmos_rl_core.algorithms._needs import trained_steps
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.pipelines import directories, sizes
from cosmos_rl_core.pipelines.sizes import FLOAT32_BYTES
from cosmos_rl_core.sampling.kernel import Kernel
from stages.artifacts.layouts import cut
from stages.artifacts.request import Request
from stages.contracts import MediaShape, Rollout

ENCODERS = 4
"""Threads per rank that encode. PNG and FFV1 release Python's lock while they compress."""
TILES_AHEAD = 2
"""Most tiles whose pixels wait in memory to be encoded when the next one is sampled."""
VAE_SAMPLE_BYTES = 32 * 2**20
"""Bytes of a sample's float32 pixels above which the VAE takes one sample at a time: a video of 480p from 8 frames on,
an image from 2.8 megapixels on. It depends on the sample alone, so that no division of the work changes bits."""


@dataclass(frozen=True)
class SamplePlan:
    """One sample to be generated."""

    sample_id: str
    prompt: Prompt
    member: int
    seed: int
    """All draws of the sample derive from it."""
    noise_seed: int
    """The initial noise derives from it. It is ``seed``, or a seed that all samples of the prompt share."""


def plan_samples(
    prompts: tuple[Prompt, ...], n_generation: int, run_seed: int, iteration: int | None, *, same_noise: bool = False
) -> list[SamplePlan]:
    """Return every member of every prompt's group, in order, with its seeds.

    Ids contain the iteration, so that samples of two rollouts never have the same id. Held-out samples have no
    iteration: their ids and seeds are equal at every policy version.
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


def is_decoded(plan: SamplePlan, share: float) -> bool:
    """Return whether a sample is among the ``share`` that is decoded. It depends on the sample's seed alone."""
    return seeds.derive("decoded", plan.seed) < share * 2**63


def recorded_steps(request: Request, kernel: Kernel, prompt_id: str) -> tuple[int, ...]:
    """Return the numbers of the solver steps to store for a prompt's samples. Random steps are steps with noise."""
    config = request.settings(Rollout)
    if not config.train_on:
        return ()
    key = (request.seed, "trained steps", request.iteration or 0, prompt_id)
    order = seeds.permutation(len(kernel.trainable), *key)
    return trained_steps(config.train_on, [kernel.trainable[i] for i in order])


def grid_facts(kernel: Kernel) -> dict[str, Any]:
    """Return a rollout's noise levels for the index: the grid ``sigmas``, and the level ``t`` of each step."""
    return {"sigmas": list(kernel.sigmas), "t": [step.t for step in kernel.steps]}


def tiles_of(samples: Sequence[SamplePlan], tile: int, model: str) -> list[list[SamplePlan]]:
    """Return the forward batches of samples, in order: at most ``tile`` samples each, with references of equal shapes.

    ``model`` is the path of the pipeline.
    """
    path = directories.resolve_path(model) if any(one.prompt.references for one in samples) else ""

    def shapes(sample: SamplePlan) -> Any:
        pictures = [(one.height, one.width) for one in sample.prompt.references]
        return sizes.reference_tokens(path, pictures) if pictures else ()

    return [part for _, some in groupby(samples, shapes) for part in cut([*some], tile)]


def row_of(plan: SamplePlan) -> dict[str, Any]:
    """Return the columns of the index that the plan of a sample decides."""
    prompt = plan.prompt
    pictures = {"references": [one.digest for one in prompt.references]} if prompt.references else {}
    return vars(plan) | {"prompt_id": prompt.id, "prompt": prompt.text, "metadata": prompt.metadata} | pictures


def vae_batches(num_samples: int, shape: MediaShape) -> list[slice]:
    """Return slices of a batch, each decoded at once: the whole batch, or single samples if they are large.

    The VAE's memory grows with the pixels of its batch. For videos it is by far the largest share of memory.
    """
    sample_bytes = FLOAT32_BYTES * 3 * shape.frames * math.prod(shape.size)
    at_once = max(1, num_samples) if sample_bytes <= VAE_SAMPLE_BYTES else 1
    return [slice(start, start + at_once) for start in range(0, num_samples, at_once)]
