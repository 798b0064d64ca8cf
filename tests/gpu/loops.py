"""Iterations of NFT on Stable Diffusion 3.5 medium with random weights: by our stages and by a naive resident loop."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn
from transformers import CLIPTextModelWithProjection, T5Config, T5EncoderModel

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.tiny.texts import clip_config, clip_tokenizer, t5_sizes, t5_tokenizer
from flows.ledger.ledger import Ledger
from flows.ledger.pages import Entry, pages
from flows.planning import requests
from flows.planning.plan import Settings, freeze, plan_of
from flows.planning.run import Run
from flows.running.display import Display
from flows.running.wave import Waves
from tests.benchmarks.models import Shape
from tests.benchmarks.naive_loop import NaiveLoop, Variant
from tests.benchmarks.timing import free, peak_of
from tests.gpu.task import Rows, Task
from tests.hand_made import rewards
from tests.stages.conftest import FEW_PROMPTS, make

SHAPE = "sd3_5_medium"
WIDTHS = 768, 1280
"""Widths of the two CLIP text encoders; together the pooled width of the transformer."""
ITERATIONS = 3
"""Iterations of each mode: the first one begins with processes that import."""
PROMPTS, GROUP, AT_ONCE = 4, 4, 8
VARIANTS: tuple[Variant, ...] = ("three", "two")


def rows(task: Task) -> Rows:
    """Yield a row an iteration of ours, warm and cold, with the seconds of each stage by cause, and of the loop."""
    device = torch.device("cpu" if task.tiny else "cuda")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began_s = time.perf_counter()
        base = _pipeline(folder / "base", device, tiny=task.tiny)
        yield {"what": "pipeline written", "seconds": time.perf_counter() - began_s}
        free(device)
        recipe = folder / "recipe.toml"
        recipe.write_text(_recipe(base, tiny=task.tiny), encoding="utf-8")
        modes = {"warm": ITERATIONS} if task.tiny else {"warm": ITERATIONS, "cold": 1}
        for mode, iterations in modes.items():
            yield from _ours(recipe, folder / mode, mode, device, 1 if task.tiny else iterations)
        for variant in VARIANTS[: 1 if task.tiny else None]:
            loop = NaiveLoop(str(recipe), variant=variant, device=device)
            for k in range(1 if task.tiny else ITERATIONS):
                told: dict[str, Any] = {}
                peak = peak_of(partial(_turn, loop, told), device)
                yield {"what": "naive", "variant": variant, "iteration": k, **told, "peak_device_bytes": peak}
            del loop
            free(device)


def _turn(loop: NaiveLoop, told: dict[str, Any]) -> None:
    told |= loop.iteration()


def _ours(recipe: Path, store: Path, mode: str, device: torch.device, iterations: int) -> Iterator[dict[str, Any]]:
    run = Run(freeze(plan_of(Settings(str(recipe), str(store), "lane")), str(store)), str(store))
    stays = {"resident_gb": 24} if mode == "warm" else {}
    launch = LaunchConfig.model_validate({"mode": mode, "device": device.type, "max_attempts": 1, **stays})
    ledger = Ledger(run.url, "lane", lambda _: None)
    with closing(Waves(run.url, launch, Display(), ledger=ledger)) as waves:
        waves.make("policy", [requests.policy(run)])
        waves.make("embed", [run.prepared.embed])
        for k in range(iterations):
            began_s = time.perf_counter()
            waves.make("rollout", [requests.rollout(run, k)])
            # In this process: the server of forks imports text recognition, which the image may not have.
            make(rewards(run, run.slots.iteration(k, "rollout"), k)[0], store)
            waves.make("update", [requests.update(run, k)])
            seconds = time.perf_counter() - began_s
            stages = {entry.stage: _told(entry) for entry in _newest(run.url, 2)}
            yield {
                "what": "ours",
                "mode": mode,
                "iteration": k,
                "iteration_s": seconds,
                "samples": PROMPTS * GROUP,
                "stages": stages,
            }
        yield {"what": "processes", "mode": mode, "ended": [*waves.processes().ended]}


def _newest(url: str, count: int) -> list[Entry]:
    return [entry for page in list(pages(url))[-count:] for entry in page.entries]


def _told(entry: Entry) -> dict[str, Any]:
    return {"seconds": round(entry.seconds, 3), **entry.spent.model_dump()}


def _recipe(base: str, *, tiny: bool) -> str:
    size, steps, length = ("32, 32", 2, 7) if tiny else ("512, 512", 10, 128)
    words = ", ".join(f"{name} = '{value}'" for name, value in FEW_PROMPTS.items())
    return f"""
[policy]
model_name_or_path = "{base}"
model_gradient_checkpointing = false
[policy.lora]
r = {2 if tiny else 32}
lora_alpha = {4 if tiny else 64}
[policy.diffusers]
inference_size = [{size}]
max_prompt_length = {length}
[policy.diffusers.sample]
num_steps = {steps}
guidance_scale = 1.0
solver = "dpm2"
[train]
num_iterations = {ITERATIONS}
param_dtype = "bfloat16"
train_batch_per_replica = {PROMPTS * GROUP}
[train.train_policy]
type = "nft"
mini_batch = {AT_ONCE}
batch_size_per_optimize = {AT_ONCE}
timesteps_fraction = 0.5
dataset = {{ {words} }}
[rollout]
n_generation = {GROUP}
n_generation_mini_batch = {GROUP}
[[rewards]]
fn = {{ name = "jpeg" }}
[early_warning]
statistics = false
"""


def _pipeline(folder: Path, device: torch.device, *, tiny: bool) -> str:
    """Write a pipeline of the shape with random weights, whose text encoders have the true widths and few layers."""
    if tiny:
        return str(tiny_pipelines.save("sd3", folder))
    shape = Shape.read(SHAPE)
    sizes: dict[str, Any] = t5_sizes() | {"d_model": shape.conditioning["prompt_embeds"][1]}
    with torch.device(device):
        transformer: Any = diffusers.SD3Transformer2DModel.from_config(shape.configs["transformer"])
        encoders = [CLIPTextModelWithProjection(_clip(width)) for width in WIDTHS]
        t5 = T5EncoderModel(T5Config(**sizes))
    _become_random(transformer)
    vae: Any = shape.vae(device)
    pipeline = diffusers.StableDiffusion3Pipeline(
        transformer=transformer.to(torch.bfloat16),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**shape.configs["scheduler"]),
        vae=vae,
        text_encoder=encoders[0],
        tokenizer=clip_tokenizer(),
        text_encoder_2=encoders[1],
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5,
        tokenizer_3=t5_tokenizer(),
    )
    pipeline.save_pretrained(folder)
    return str(folder)


def _clip(width: int) -> Any:
    config = clip_config()
    config.hidden_size = config.projection_dim = width
    return config


@torch.no_grad()
def _become_random(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.normal_(std=0.02)
