"""What a user would see: samples of the stock diffusers pipeline with the exported weights, prompts and seeds fixed.

As users run it, it is not split: each rank makes videos of its own, whatever ``launch.cp_size`` is.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cosmos_rl_core import pipelines, seeds
from cosmos_rl_core.models._loading import stock_arguments
from stages import contracts
from stages.artifacts import Artifact
from stages.contracts import Request
from stages.loading import load_stock, prompt_options
from stages.runner import Context
from stages.samples import SamplePlan, plan_samples, sample_files, write_samples


def run(request: Request, context: Context) -> dict[str, float]:
    """Write ``samples/<n>.tar`` and ``index.parquet``, as a rollout does, without latents."""
    config = request.config
    assert isinstance(config, contracts.Evaluate)
    pipeline = _load(request, config, context.ranks.device)
    facts = {"export": request.one("export").content}

    def generate(plans: list[SamplePlan]) -> dict[str, bytes]:
        files: dict[str, bytes] = {}
        for plan, pixels in zip(plans, _generate(pipeline, plans, config), strict=True):
            files |= sample_files(plan, pixels, None, facts)
        return files

    samples = plan_samples(config.prompts, config.n_generation, request.seed, 0)
    return write_samples(context, samples, generate, samples_per_shard=config.samples_per_shard, tile=config.batch_size)


def _load(request: Request, config: contracts.Evaluate, device: torch.device) -> Any:
    """The stock pipeline: the base with the exported LoRA loaded into it, or the exported pipeline itself."""
    with tempfile.TemporaryDirectory() as folder:
        names = Artifact(request.one("export")).copy_to(Path(folder))
        full = any(name.startswith("pipeline/") for name in names)
        path = str(Path(folder, "pipeline")) if full else pipelines.resolve_path(config.model.path)
        pipeline = load_stock(config.model, path)
        if not full:
            pipeline.load_lora_weights(
                str(Path(folder, "lora")), weight_name="model.safetensors", adapter_name="default"
            )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(device)


def _generate(pipeline: Any, plans: list[SamplePlan], config: contracts.Evaluate) -> np.ndarray:
    """Uint8 RGB ``[B, frames, height, width, 3]``, from noise that depends on each sample's seed alone."""
    video = config.media.frames > 1
    generators = [torch.Generator(device="cpu").manual_seed(seeds.derive(plan.seed, "evaluation")) for plan in plans]
    output = pipeline(
        prompt=[plan.prompt.text for plan in plans],
        num_inference_steps=config.num_steps,
        guidance_scale=pipelines.stock_guidance_scale(config.model.path, config.guidance_scale),
        max_sequence_length=config.max_prompt_length,
        generator=generators,
        output_type="np",
        **prompt_options(config.model),
        **stock_arguments(pipeline, config.media.size, config.media.frames),
    )
    pixels = np.asarray(output.frames if video else output.images)
    return (255 * (pixels if video else pixels[:, None])).round().astype(np.uint8)
