"""The published layout of VideoReward around a tiny Qwen2-VL, converted."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from cosmos_rl_core.rewards._vlm.video_align import TOKENS
from cosmos_rl_core.rewards.video_align import prepare
from tests.core.vlms import tiny
from tests.core.vlms.cases import QWEN2
from tests.tiny_scorers.hpsv3 import older

RANK, ALPHA, ADAPTED = 2, 6.0, "q_proj.weight"
TEXT = "Rate it. {text_prompt} " + " ".join(f"{token} END" for token in TOKENS.values())


def published(folder: Path) -> None:
    """Write the files as they are published: a base, and a pickle with adapters, a head and three more embeddings."""
    tiny.save_model(folder / "base", QWEN2)
    old = {older(name): tensor for name, tensor in load_file(folder / "base" / "model.safetensors").items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        made: dict[str, torch.Tensor] = {}
        for name, tensor in old.items():
            adapted = name.endswith(ADAPTED)
            made[f"base_model.model.{name.replace('.weight', '.base_layer.weight') if adapted else name}"] = tensor
            if adapted:
                stem = f"base_model.model.{name.removesuffix('.weight')}"
                made[f"{stem}.lora_A.default.weight"] = torch.randn(RANK, tensor.shape[1])
                made[f"{stem}.lora_B.default.weight"] = torch.randn(tensor.shape[0], RANK)
        embeddings = "base_model.model.model.embed_tokens.weight"
        made[embeddings] = torch.cat([made[embeddings], torch.randn(len(TOKENS), made[embeddings].shape[1])])
        head = torch.randn(1, made[embeddings].shape[1])
        made["base_model.model.rm_head.modules_to_save.default.weight"] = head
        made["base_model.model.rm_head.original_module.weight"] = torch.zeros_like(head)
    (folder / "checkpoint-7").mkdir()
    torch.save(made, folder / "checkpoint-7" / "model.pth")
    moments = {f"{name}_{key}": value for name in ("VQ", "MQ", "TA") for key, value in (("mean", 0.5), ("std", 2.0))}
    lora = {"lora_r": RANK, "lora_alpha": ALPHA, "use_rslora": False}
    (folder / "model_config.json").write_text(json.dumps({"peft_lora_config": lora, "inference_config": moments}))
    text = f"import nothing_that_exists\nDETAILED_PROMPT_WITH_SPECIAL_TOKEN = {TEXT!r}\n"
    (folder / "prompt_template.py").write_text(text, encoding="utf-8")


def settings(folder: Path) -> dict[str, Any]:
    published(folder / "published")
    prepare(folder / "published", folder / "prepared")
    sizes = {"min_frame_pixels": 128, "max_frame_pixels": 512}
    return {"model": str(folder / "prepared"), "param_dtype": "float32", "fps": 8.0, **sizes}
