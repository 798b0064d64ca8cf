"""An optimizer step on a Qwen3-VL of 2B with random weights, by the code of the stage ``finetune`` of VLMs."""

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import torch
import transformers
from torch import Tensor, nn

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.config.shared import OptimizerSteps
from cosmos_rl_core.config.vlm.recipe import VlmRecipe
from cosmos_rl_core.conversations import segments
from cosmos_rl_core.conversations.encoding import IGNORED, Encoded
from cosmos_rl_core.conversations.packing import Inputs, packed
from cosmos_rl_core.parallel import sharding
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.vlms._base import Visual
from cosmos_rl_core.weights.parts import CURRENT
from cosmos_rl_core.weights.policy_weights import initial_lora, prepare
from flows.vlm import memory
from stages.execution import torch_runtime
from stages.execution.execution import Execution
from stages.vlm.finetune import PackedRow, VlmTrainer
from tests.benchmarks import flops, record
from tests.benchmarks.__main__ import DTYPE
from tests.benchmarks.timing import free, peak_of, seconds_of
from tests.gpu.causes import causes
from tests.gpu.shapes import REPEATS, besides_peaks
from tests.gpu.task import Row, Rows, Task

NAME, ARCHITECTURE = "qwen3_vl_2b", "Qwen3VLForConditionalGeneration"
TEXT = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True,
    "max_position_embeddings": 262_144,
}  # fmt: skip
ROPE = {"mrope_section": [24, 20, 20], "rope_type": "default", "rope_theta": 5e6}
VISION = {
    "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048,
    "patch_size": 16, "deepstack_visual_indexes": [5, 11, 17], "num_position_embeddings": 2304,
}  # fmt: skip
TOKENS = {
    "image_token_id": 151_655,
    "video_token_id": 151_656,
    "vision_start_token_id": 151_652,
    "vision_end_token_id": 151_653,
}
"""Sizes of Qwen3-VL 2B, as published."""
SMALL: dict[str, dict[str, Any]] = {
    "text": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    | {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 300, "max_position_embeddings": 512},
    "rope": {"mrope_section": [4, 2, 2]},
    "vision": {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    | {"patch_size": 4, "deepstack_visual_indexes": [0], "num_position_embeddings": 64},
    "tokens": dict(zip(TOKENS, (290, 291, 292, 293), strict=True)),
}
MERGE, FRAMES, CHANNELS = 2, 2, 3
"""Patches a side of a token, frames of a patch, and colours."""
CONVERSATIONS, IMAGE_PATCHES, TEXT_TOKENS = 4, 32, 768
"""Conversations of a row, patches a side of the image that each is about, and tokens of text in each."""


def config(*, tiny: bool) -> dict[str, Any]:
    """Return the settings of the model."""
    small: dict[str, dict[str, Any]] = SMALL if tiny else {part: {} for part in SMALL}
    text = TEXT | small["text"] | {"rope_parameters": ROPE | small["rope"]}
    model: dict[str, Any] = {"architectures": [ARCHITECTURE], "model_type": "qwen3_vl", "tie_word_embeddings": True}
    model |= {"text_config": text, "vision_config": VISION | small["vision"]}
    return model | TOKENS | small["tokens"]


def trained(*, tiny: bool) -> dict[str, LoraConfig | None]:
    """Return what trains: adapters of the language model, or the whole language model with the projector."""
    rank = 2 if tiny else 32
    modules = ("q_proj", "k_proj", "v_proj", "o_proj")
    return {"lora": LoraConfig(r=rank, lora_alpha=2.0 * rank, target_modules=modules), "full": None}


def counts(task: Task) -> Rows:
    """Yield the planned memory of training, without activations, which plans of VLMs do not count."""
    with tempfile.TemporaryDirectory() as name:
        for file, values in _files(config(tiny=task.tiny)).items():
            Path(name, file).write_text(json.dumps(values), encoding="utf-8")
        for trains, lora in trained(tiny=task.tiny).items():
            policy: dict[str, Any] = {"model_name_or_path": name, "trains": ["projector", "language"]}
            policy |= {} if lora is None else {"lora": lora.model_dump(exclude_unset=True)}
            train = {"num_iterations": 1, "param_dtype": DTYPE, "ema_enable": False, "train_policy": _POLICY}
            recipe = VlmRecipe.model_validate({"policy": policy, "train": train})
            (counted,) = memory.stages(recipe, name, ["vlm_finetune"])
            held = {kind: row.device for kind, row in counted.rows.items() if row.device}
            yield {"what": "planned memory", "trains": trains, "bytes": counted.peak.device, "by_kind": held}


def _files(model: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the files that a plan reads: the model's config, and the settings of media."""
    image: dict[str, Any] = {"patch_size": model["vision_config"]["patch_size"]}
    image |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    video = image | {"size": {"shortest_edge": 4096, "longest_edge": 25_165_824}}
    image["size"] = {"shortest_edge": 65_536, "longest_edge": 16_777_216}
    return {"config.json": model, "preprocessor_config.json": image, "video_preprocessor_config.json": video}


_POLICY: dict[str, Any] = {
    "type": "vlm_sft",
    "row_length": CONVERSATIONS * (TEXT_TOKENS + (IMAGE_PATCHES // MERGE) ** 2 + 2),
    "datasets": {"none": {"name": "llava", "annotation_path": "none.json", "media_path": "none"}},
}


def rows(task: Task) -> Rows:
    """Yield a row for a step on adapters and for one on the language model, and the causes of both."""
    group = torch_runtime.start(Execution(device="cpu" if task.tiny else "cuda"))
    for trains, lora in trained(tiny=task.tiny).items():
        yield from _step_rows(task, group, trains, lora)
        free(group.device)


def _step_rows(task: Task, group: Group, trains: str, lora: LoraConfig | None) -> Rows:
    model = _model(group.device, tiny=task.tiny)
    weights = prepare(model, lora, reference=False, trains=lambda name: "visual" not in name or "merger" in name)
    if lora is not None:
        shapes = {name: tuple(parameter.shape) for name, parameter in weights.parameters.items()}
        weights.load(CURRENT, initial_lora(shapes, lora, seed=0))
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    context: Any = SimpleNamespace(ranks=group, progress=lambda *_: None)
    trainer = VlmTrainer(model, weights, _steps(), DTYPE, context)
    row = _row(model, 4 if task.tiny else IMAGE_PATCHES, 12 if task.tiny else TEXT_TOKENS)
    labels = int((row["labels"] != IGNORED).sum())

    def step() -> None:
        trainer.step(0, [PackedRow(row, 1 / labels)])

    seconds = seconds_of(step, group.device, 1 if task.tiny else REPEATS)
    total, peak = _flops(model, row, 3 if lora is None else 2), flops.peak_flops(record.device_name(), DTYPE)
    found: Row = {
        "what": "work",
        "shape": NAME,
        "work": f"{trains} step",
        "param_dtype": DTYPE,
        "conversations": len(row["lengths"]),
        "tokens": row["input_ids"].shape[1],
        "patches": len(row["pixel_values"]),
        "seconds": seconds,
        "samples_per_s": len(row["lengths"]) / seconds,
        "tokens_per_s": row["input_ids"].shape[1] / seconds,
        "peak_bytes": peak_of(step, group.device),
        "planned_bytes": task.fact(f"counts {NAME}", what="planned memory", trains=trains).get("bytes"),
        "flops": total,
        "mfu": None if peak is None else total / seconds / peak,
    }
    yield found | besides_peaks(task, found)
    yield {"what": "causes", "work": f"{trains} step", **causes(step, group.device)}


def _model(device: torch.device, *, tiny: bool) -> Any:
    cls = getattr(transformers, ARCHITECTURE)
    with accelerate.init_empty_weights(include_buffers=False):
        model = cls(cls.config_class(**config(tiny=tiny)))
    segments.use(model)
    sharding.materialise(model, device)
    model.tie_weights()
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02, generator=generator)
    return model


def _row(model: Any, side: int, text: int) -> Inputs:
    """Return a row of conversations, each of an image of random numbers and a text, half of which is an answer."""
    sizes, generator = model.config.vision_config, torch.Generator("cpu").manual_seed(1)
    image = torch.full((side * side // MERGE**2,), model.config.image_token_id, device="cpu")
    borders = model.config.vision_start_token_id, model.config.vision_end_token_id
    start, end = (torch.tensor([one], device="cpu") for one in borders)
    found: list[Encoded] = []
    for _ in range(CONVERSATIONS):
        words = torch.randint(0, 256, (text,), generator=generator, device="cpu")
        ids = torch.cat([start, image, end, words])
        labels = torch.full_like(ids, IGNORED, device="cpu")
        labels[-text // 2 :] = ids[-text // 2 :]
        width = CHANNELS * FRAMES * sizes.patch_size**2
        pixels = torch.randn(side * side, width, generator=generator, device="cpu")
        inputs: dict[str, Tensor | list[Any]] = {
            "pixel_values": pixels,
            "image_grid_thw": torch.tensor([[1, side, side]], device="cpu"),
        }
        kinds = (ids == model.config.image_token_id).long()
        found.append(Encoded(ids, labels, kinds, [Visual("", inputs)], [(1, 1 + len(image))]))
    return packed(model, found)


def _flops(model: Any, row: Inputs, times: int) -> int:
    """Return the useful operations of a step: ``times`` forward passes of the language model, one of the vision tower.

    A linear layer takes 2 x weights for each token that passes it, attention 4 x width for each pair of tokens that see
    each other. The output layer sees labels alone.
    """
    text, vision = model.config.text_config, model.config.vision_config
    tokens, patches = row["input_ids"].shape[1], len(row["pixel_values"])
    language, tower = 0, 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "lora" not in name:
            weights = 2 * module.weight.numel()
            if "lm_head" in name:
                language += weights * int((row["labels"] != IGNORED).sum())
            elif "visual" in name:
                tower += weights * (patches // MERGE**2 if "merger" in name else patches)
            else:
                language += weights * tokens
    pairs = sum(length**2 / 2 for length in row["lengths"].tolist())
    language += int(4 * pairs * text.num_attention_heads * text.head_dim * text.num_hidden_layers)
    tower += 4 * patches**2 // len(row["lengths"]) * vision.hidden_size * vision.depth
    return times * language + tower


def _steps() -> OptimizerSteps:
    rates: Any = {"lrs": (1e-5,), "ema_decays": (None,)}
    return OptimizerSteps(**rates, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.01, grad_norm_clip=1.0, first_step=0)
