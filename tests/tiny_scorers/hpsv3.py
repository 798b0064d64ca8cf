"""The published layout of HPSv3 around a tiny Qwen2-VL, converted."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from cosmos_rl_core.rewards.hpsv3 import prepare
from tests.core.vlms import tiny
from tests.core.vlms.cases import QWEN2

TEXT = "\nRate it.\nText - {text_prompt}\n\nRating: <|Reward|>\n\nEND\n"
SIZES = {"rm_head.0": (1024, 16), "rm_head.3": (16, 1024), "rm_head.5": (2, 16)}
"""Layers of the published head, whose other places are without weights."""


def published(folder: Path) -> None:
    """Write the files as they are published: a base, weights by the older names with one more embedding, and a text."""
    tiny.save_model(folder / "base", QWEN2)
    pictures = json.loads((folder / "base" / "preprocessor_config.json").read_text(encoding="utf-8"))
    wide = {**pictures, "min_pixels": 256, "max_pixels": 2**20}
    (folder / "base" / "preprocessor_config.json").write_text(json.dumps(wide), encoding="utf-8")
    made = {older(name): tensor for name, tensor in load_file(folder / "base" / "model.safetensors").items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        # At the default scale of weights a tiny model sees all pictures alike.
        made = {name: 6 * tensor if tensor.ndim > 1 else tensor for name, tensor in made.items()}
        embeddings = made["model.embed_tokens.weight"]
        made["model.embed_tokens.weight"] = torch.cat([embeddings, torch.randn(1, embeddings.shape[1])])
        made["lm_head.weight"] = torch.zeros(len(embeddings) + 1, embeddings.shape[1])
        for name, shape in SIZES.items():
            made[f"{name}.weight"], made[f"{name}.bias"] = torch.randn(shape) / shape[1] ** 0.5, torch.randn(shape[0])
    save_file(made, folder / "HPSv3.safetensors")
    first, second = TEXT[: TEXT.index("\nRating")], TEXT[TEXT.index("\nRating") :]
    text = f"import nothing_that_exists\nINSTRUCTION = {first!r}\nprompt_with_special_token = {second!r}\n"
    (folder / "data_collator_qwen.py").write_text(text, encoding="utf-8")


def older(name: str) -> str:
    """Return a weight's name as transformers 4 wrote it."""
    return name.removeprefix("model.") if ".visual." in name else name.replace("model.language_model.", "model.")


def settings(folder: Path) -> dict[str, Any]:
    published(folder / "published")
    prepare(folder / "published", folder / "prepared")
    return {"model": str(folder / "prepared"), "param_dtype": "float32"}
