"""Samples of the stock diffusers pipeline with the exported weights, with fixed prompts and seeds.

The pipeline is not split: each rank makes videos of its own, whatever ``launch.dp_shard_size`` and ``launch.cp_size``
are. The device of a rank holds the whole pipeline: text encoders and VAE in float32, like `embed` and `rollout`, and
the transformer's matrices in ``param_dtype``: 29 GB instead of 57 GB for 14B in bfloat16. The CPU's memory holds one
tensor of the transformer at a time. If the store is no directory, the ranks of a machine share one copy of the export
on its disk.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from cosmos_rl_core import seeds
from cosmos_rl_core.models._loading import stock_arguments
from cosmos_rl_core.models._refusals import refused
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.parallel.precision import half
from cosmos_rl_core.pipelines import directories, guidance
from cosmos_rl_core.weights.lora_layers import adapt, merge
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Input, Request
from stages.execution.context import Context
from stages.formats.references import Pictures
from stages.generating.encoding import Encoding, with_media
from stages.generating.plans import SamplePlan, plan_samples, vae_batches
from stages.generating.units import write_samples
from stages.training.loading import load_stock, prompt_options


def run(request: Request, context: Context[Group]) -> dict[str, float]:
    """Write samples in units, without the part ``tensors``."""
    config = request.settings(contracts.Evaluate)
    pipeline = _load(request, config, context.ranks)
    if len(vae_batches(2, config.media)) > 1:
        pipeline.vae.enable_slicing()
    samples = plan_samples(config.prompts, config.n_generation, request.seed, iteration=None)
    pictures = Pictures(request.home)
    generator = _Stock(pipeline, config, {"export": request.one("export").content}, pictures)
    return write_samples(context, config, samples, generator, tensors=False)


@dataclass(frozen=True)
class _Stock:
    """A generator of planned samples that calls the stock pipeline."""

    pipeline: Any
    config: contracts.Evaluate
    facts: dict[str, Any]
    """Columns of the index that are equal for every sample, with their values."""
    pictures: Pictures

    def sample(self, plans: list[SamplePlan]) -> list[tuple[np.ndarray | None, bool]]:
        """Return the pixels of each sample, and whether a guardrail refused them."""
        if not any(plan.prompt.references for plan in plans):
            found = _generate(self.pipeline, plans, self.config)
            return list(zip(found, refused(self.pipeline, len(plans)), strict=True))
        # A call of a stock pipeline takes the references of one prompt only.
        made: list[tuple[np.ndarray | None, bool]] = []
        for plan in plans:
            found = _generate(self.pipeline, [plan], self.config, self._references(plan))
            made += zip(found, refused(self.pipeline, 1), strict=True)
        return made

    def _references(self, plan: SamplePlan) -> dict[str, Any]:
        """Return the arguments of the stock call that pass a prompt's references."""
        takes = directories.spec(directories.resolve_path(self.config.model.path)).references
        assert takes is not None, "plans refuse references of other models"
        arrays = self.pictures.of([one.digest for one in plan.prompt.references])
        images = [Image.fromarray(frame) for array in arrays for frame in array]
        return {takes.argument: images if takes.takes_list else images[0], **takes.with_argument(len(arrays[0]))}

    def encodings(self, plans: list[SamplePlan], sampled: list[tuple[np.ndarray | None, bool]]) -> list[Encoding]:
        """Return for each sample the function that encodes it."""
        return [
            partial(with_media, plan, None if lost else pixels, None, self.facts, refused=lost and pixels is not None)
            for plan, (pixels, lost) in zip(plans, sampled, strict=True)
        ]


def _load(request: Request, config: contracts.Evaluate, ranks: Group) -> Any:
    """Return the exported pipeline, or the base's stock pipeline with the exported LoRA, which is merged in float32."""
    with _brought(request.one("export"), ranks) as folder:
        full, lora = folder / "pipeline", str(folder / "lora")
        path = str(full) if full.is_dir() else directories.resolve_path(config.model.path)
        references = any(prompt.references for prompt in config.prompts)
        pipeline = load_stock(config.model, path, config.param_dtype, ranks.device, references=references)
        if not full.is_dir():
            pipeline.load_lora_weights(lora, weight_name="model.safetensors", adapter_name="default")
            adapted = adapt(pipeline.transformer)
            if half(config.param_dtype) is None:
                merge(adapted)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(ranks.device)


@contextmanager
def _brought(export: Input, ranks: Group) -> Iterator[Path]:
    """Yield a local directory with the export's files, every byte checked, shared by the ranks of a machine.

    Each rank brings some of the files. The directory is removed when all ranks have left. Collective.
    """
    with tempfile.TemporaryDirectory() as own:
        folder = Path(ranks.gather(own)[ranks.here[0]])
        Artifact(export).bring_to(folder, ranks.here.index(ranks.rank), len(ranks.here))
        # All ranks have brought their files.
        ranks.gather(None)
        yield folder
        # All ranks have left the directory.
        ranks.gather(None)


def _generate(
    pipeline: Any, plans: list[SamplePlan], config: contracts.Evaluate, references: Mapping[str, Any] | None = None
) -> list[np.ndarray | None]:
    """Return uint8 RGB ``[frames, height, width, 3]`` of each sample, from noise that depends on its seed alone.

    None for a sample whose latents or pixels are not finite.
    """
    finite = np.ones(len(plans), bool)

    def look(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """Note which of the last step's latents are finite: some pipelines convert them to integers afterwards."""
        finite[:] = tensors["latents"].isfinite().flatten(1).all(1).cpu().numpy()
        return {}

    draws = [seeds.derive(plan.seed, "evaluation") for plan in plans]
    generators = [torch.Generator(device="cpu").manual_seed(draw) for draw in draws]
    spec = directories.spec(directories.resolve_path(config.model.path))
    told = guidance.stock_arguments(
        spec,
        config.guidance_scale,
        config.negative_prompt,
        config.model.embedded_guidance_scale,
        len(plans),
    )
    output = pipeline(
        prompt=[plan.prompt.text for plan in plans],
        num_inference_steps=config.num_steps,
        max_sequence_length=config.max_prompt_length,
        generator=generators,
        output_type="np",
        callback_on_step_end=look,
        **(references or {}),
        **told,
        **guidance.stock_options(spec, config.model),
        **prompt_options(config.model),
        **stock_arguments(pipeline, config.media.size, config.media.frames),
    )
    # A pipeline of videos returns frames also of a video of one frame.
    pixels = np.asarray(output.frames) if hasattr(output, "frames") else np.asarray(output.images)[:, None]
    finite &= np.isfinite(pixels).all(axis=(1, 2, 3, 4))
    return [
        (255 * picture).round().astype(np.uint8) if is_finite else None
        for picture, is_finite in zip(pixels, finite, strict=True)
    ]
