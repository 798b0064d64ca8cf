"""What a user would see: samples of the stock diffusers pipeline with the exported weights, prompts and seeds fixed."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline

from cosmos_rl_core import pipelines, seeds, shards
from stages import contracts
from stages.artifacts import Artifact
from stages.contracts import Request
from stages.runner import Context
from stages.samples import INDEX, SamplePlan, cut, index_of, plan_samples, sample_files, shard_name


def run(request: Request, context: Context) -> dict[str, int]:
    """Write ``samples/<n>.tar`` and ``index.parquet``, as a rollout does, without latents."""
    config = request.config
    assert isinstance(config, contracts.Evaluate)
    samples = plan_samples(config.prompts, config.n_generation, request.seed, 0)
    by_id = {s.sample_id: s for s in samples}
    layout = context.layout({"shards": cut(list(by_id), config.samples_per_shard), "tile": config.batch_size})
    pipeline = _load(request, config, context.ranks.device)
    mine = range(context.ranks.rank, len(layout["shards"]), context.ranks.world_size)
    for done, index in enumerate(mine):
        plans = [by_id[sample_id] for sample_id in layout["shards"][index]]

        def make(index: int = index, plans: list[SamplePlan] = plans, done: int = done) -> dict[str, bytes]:
            files: dict[str, bytes] = {}
            for tile in range(0, len(plans), layout["tile"]):
                context.progress(
                    "evaluating", done * config.samples_per_shard + tile, len(mine) * config.samples_per_shard
                )
                batch = plans[tile : tile + layout["tile"]]
                for plan, pixels in zip(batch, _generate(pipeline, batch, config), strict=True):
                    files |= sample_files(plan, pixels, None, {"export": request.one("export").content})
            return {shard_name(index): shards.pack(files)}

        context.attempt.shard(index, make)
    if context.ranks.rank == 0:
        context.attempt.put(INDEX, index_of(samples, layout["shards"]))
    return {"samples": len(samples)}


def _load(request: Request, config: contracts.Evaluate, device: torch.device) -> Any:
    """The stock pipeline: the base with the exported LoRA loaded into it, or the exported pipeline itself."""
    with tempfile.TemporaryDirectory() as folder:
        names = Artifact(request.one("export")).copy_to(Path(folder))
        full = any(name.startswith("pipeline/") for name in names)
        path = str(Path(folder, "pipeline")) if full else pipelines.resolve_path(config.model.path)
        pipeline: Any = DiffusionPipeline.from_pretrained(
            path, dtype=torch.float32, use_safetensors=True, local_files_only=True
        )
        if not full:
            pipeline.load_lora_weights(
                str(Path(folder, "lora")), weight_name="model.safetensors", adapter_name="default"
            )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(device)


def _generate(pipeline: Any, plans: list[SamplePlan], config: contracts.Evaluate) -> np.ndarray:
    """Uint8 RGB ``[B, frames, height, width, 3]``, from noise that depends on each sample's seed alone."""
    height, width = config.media.size
    video = config.media.frames > 1
    generators = [torch.Generator(device="cpu").manual_seed(seeds.derive(plan.seed, "evaluation")) for plan in plans]
    output = pipeline(
        prompt=[plan.prompt.text for plan in plans],
        height=height,
        width=width,
        num_inference_steps=config.num_steps,
        guidance_scale=config.guidance_scale,
        max_sequence_length=config.max_prompt_length,
        generator=generators,
        output_type="np",
        **({"num_frames": config.media.frames} if video else {}),
    )
    pixels = np.asarray(output.frames if video else output.images)
    return (255 * (pixels if video else pixels[:, None])).round().astype(np.uint8)
