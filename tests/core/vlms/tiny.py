"""Folders of VLMs of toy size: random weights, a tokenizer made by hand, settings of media, and what they are asked.

Imports no torch before :func:`save_model`.
"""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cosmos_rl_core.tiny.qwen3_vl import tokenizer, vocabulary
from tests.core.vlms.cases import QWEN2, QWEN3, QWEN25

LETTERS, STOPS = "abcdefghijklmnopqrstuvwxyz", "aeiouqrz"
"""Tokens of the answers of :func:`save_talker`."""
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    QWEN25: {
        "image": {"patch_size": 4, "min_pixels": 128, "max_pixels": 1024},
        "video": {"patch_size": 4, "size": {"shortest_edge": 128, "longest_edge": 512}},
    },
    QWEN3: {
        "image": {"patch_size": 4, "size": {"shortest_edge": 128, "longest_edge": 1024}, "image_mean": [0.5] * 3}
        | {"image_std": [0.5] * 3},
        "video": {"patch_size": 4, "size": {"shortest_edge": 512, "longest_edge": 4096}},
    },
}
SETTINGS[QWEN2] = SETTINGS[QWEN25]
"""Patches of 4 pixels, so that a token is 8 pixels wide."""


def config(architecture: str, patch_size: int = 4) -> dict[str, Any]:
    """Settings of a model with two layers of width 16."""
    words = vocabulary()
    sizes = {"hidden_size": 16, "intermediate_size": 16}
    text = {**sizes, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "head_dim": 8}
    rope = {"mrope_section": [2, 1, 1], "rope_type": "default", "rope_theta": 10000.0}
    vision = {**sizes, "depth": 2, "num_heads": 2, "out_hidden_size": 16, "patch_size": patch_size}
    own: dict[str, dict[str, Any]] = {
        QWEN2: {"embed_dim": 16, "mlp_ratio": 1},
        QWEN25: {"window_size": 4 * patch_size, "fullatt_block_indexes": [1], "tokens_per_second": 2},
        QWEN3: {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    }
    model_types = {QWEN2: "qwen2_vl", QWEN25: "qwen2_5_vl", QWEN3: "qwen3_vl"}
    return {
        "architectures": [architecture],
        "model_type": model_types[architecture],
        "text_config": {**text, "vocab_size": len(words), "rope_parameters": rope, "max_position_embeddings": 4096},
        "vision_config": {**vision, **own[architecture]},
        "image_token_id": words["<|image_pad|>"],
        "video_token_id": words["<|video_pad|>"],
        "vision_start_token_id": words["<|vision_start|>"],
        "vision_end_token_id": words["<|vision_end|>"],
    }


def save(folder: Path, architecture: str, settings: dict[str, dict[str, Any]] | None = None) -> str:
    """Write everything but the weights; the path of the folder."""
    tokenizer().save_pretrained(folder)
    settings = settings or SETTINGS[architecture]
    patch_size = settings["image"].get("patch_size", 14)
    files = {"config.json": config(architecture, patch_size), "preprocessor_config.json": settings["image"]}
    for name, values in {**files, "video_preprocessor_config.json": settings["video"]}.items():
        (folder / name).write_text(json.dumps(values), encoding="utf-8")
    return str(folder)


def save_model(folder: Path, architecture: str, **changes: Any) -> str:
    """Write everything, with random weights. ``changes`` replace settings of the model."""
    torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        values = config(architecture) | changes
        cls = getattr(transformers, architecture)
        cls(cls.config_class(**values)).save_pretrained(folder)
    path = save(folder, architecture)
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return path


def save_talker(folder: Path, architecture: str, tokens: Sequence[str] = LETTERS, stops: Sequence[str] = STOPS) -> str:
    """Write everything, with random weights that answer with some of ``tokens``, and end with one of ``stops``.

    Other media have other answers, of one to four letters.
    """
    torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
    words = vocabulary()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        cls = getattr(transformers, architecture)
        model = cls(cls.config_class(**config(architecture)))
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
        said = torch.zeros(len(words), 1, device="cpu")
        said[[words[token] for token in tokens]] = 1
        model.lm_head.weight.mul_(said)
    model.generation_config.eos_token_id = [words[token] for token in stops]
    model.save_pretrained(folder)
    return save(folder, architecture)
