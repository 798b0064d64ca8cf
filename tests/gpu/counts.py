"""Counts of a shape that need no device: the arithmetic of a forward pass, and the memory that a plan foresees."""

import importlib.util
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.recipes.reading import check
from flows.sizes import memory
from tests.benchmarks import flops
from tests.benchmarks.models import Shape
from tests.gpu.lane import SHAPES
from tests.gpu.task import Rows, Task

CLIP_TOKENS = 77
PLANNED = {"sampling": "rollout", "nft step": "update"}
"""The stage whose work is measured, by the name of the measured work."""
FEW_STEPS = 4
"""Solver steps of videos in the lane: sampling is as many times one step."""


def shape_of(task: Task) -> Shape:
    """Return the shape that a part measures; of a video few solver steps."""
    shape = Shape.read(task.options[0], tiny=task.tiny)
    return shape.with_steps(min(shape.num_steps, FEW_STEPS)) if shape.frames > 1 else shape


def rows(task: Task) -> Rows:
    """Yield the operations of a forward pass of one sample, and the planned memory of each measured stage."""
    shape = shape_of(task)
    left_out = {}
    if shape.configs["transformer"].get("concat_padding_mask") and importlib.util.find_spec("torchvision") is None:
        # Without torchvision a Cosmos transformer cannot scale its padding mask, one of 18 channels of its input.
        transformer = shape.configs["transformer"] | {"concat_padding_mask": False}
        shape = replace(shape, configs=shape.configs | {"transformer": transformer})
        left_out = {"left out": "the channel of the padding mask"}
    yield {"what": "forward", "shape": shape.name, "flops": flops.forward_flops(shape), **left_out}
    if task.tiny and shape.name != SHAPES[0]:
        # Each of the others takes two processes with torch.
        return
    with _planned(shape) as values:
        recipe = check(values, "the lane")
        counted = {found.stage: found for found in memory.stages(recipe, PLANNED.values(), activations=True)}
    for work, stage in PLANNED.items():
        held = {name: row.device for name, row in counted[stage].rows.items() if row.device}
        of_stage = {"what": "planned memory", "shape": shape.name, "work": work}
        yield of_stage | {"bytes": counted[stage].peak.device, "by_kind": held}


@contextmanager
def _planned(shape: Shape) -> Iterator[dict[str, Any]]:
    """Return a recipe of the shape's work, on files of its pipeline without weights."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape.write(folder)
        index = json.loads((folder / directories.INDEX).read_text(encoding="utf-8"))
        index |= {part: [None, None] for part in shape.without}
        (folder / directories.INDEX).write_text(json.dumps(index), encoding="utf-8")
        tokenizer = folder / "tokenizer"
        tokenizer.mkdir()
        (tokenizer / "tokenizer_config.json").write_text(json.dumps({"model_max_length": CLIP_TOKENS}), "utf-8")
        yield recipe_of(shape, str(folder))


def recipe_of(shape: Shape, path: str) -> dict[str, Any]:
    """Return the values of a recipe of NFT on a pipeline of the shape: one batch of samples at once, on a GPU."""
    samples = max(2, shape.batch)
    sample = {"num_steps": shape.num_steps, "guidance_scale": 1.0, "solver": shape.solver}
    return {
        "policy": {
            "model_name_or_path": path,
            "model_gradient_checkpointing": shape.gradient_checkpointing,
            "lora": {"r": shape.lora_rank, "lora_alpha": 2.0 * shape.lora_rank},
            "diffusers": {
                "inference_size": [*shape.size],
                "train_frames": shape.frames,
                "max_prompt_length": shape.max_prompt_length,
                "sample": sample,
            },
        },
        "train": {
            "num_iterations": 1,
            "param_dtype": "bfloat16",
            "train_batch_per_replica": samples,
            "train_policy": {
                "type": "nft",
                "mini_batch": shape.batch,
                "batch_size_per_optimize": samples,
                "dataset": {"name": "ocr"},
            },
        },
        "rollout": {"n_generation": samples, "n_generation_mini_batch": shape.batch},
        "rewards": [{"fn": {"name": "jpeg"}}],
        "launch": {"device": "cuda", "mode": "cold"},
    }
