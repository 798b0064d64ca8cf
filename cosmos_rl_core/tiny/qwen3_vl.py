"""A Qwen3-VL of 350,000 random weights in the files of transformers, with a tokenizer of single bytes.

Imports no torch before :func:`save`.
"""

import importlib
import json
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

ARCHITECTURE = "Qwen3VLForConditionalGeneration"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
PADS = ("<|image_pad|>", "<|video_pad|>")
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% for part in message['content'] -%}
{%- if part['type'] == 'text' -%}{{ part['text'] }}
{%- else -%}<|vision_start|><|{{ part['type'] }}_pad|><|vision_end|>
{%- endif -%}
{%- endfor -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
"""Template of conversations. It writes the same as Qwen2.5-VL's and Qwen3-VL's, without system prompt and tools."""

WIDTH = 64
DEVIATION = 0.08
"""Standard deviation of the random weights. With 0.02, which suits far wider layers, the model tells only half of the
answers apart for hundreds of steps."""
MEDIA: dict[str, dict[str, Any]] = {
    "preprocessor_config.json": {
        "patch_size": 4,
        "size": {"shortest_edge": 64, "longest_edge": 4096},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    },
    "video_preprocessor_config.json": {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 8192}},
}
"""Patches of 4 pixels, so that a token is 8 pixels wide."""


def vocabulary() -> dict[str, int]:
    """Return the tokens and their numbers: every byte, and the special ones."""
    return {token: number for number, token in enumerate([*sorted(ByteLevel.alphabet()), *SPECIAL, *PADS])}


def tokenizer() -> Qwen2Tokenizer:
    """Return the tokenizer, with the template of conversations."""
    made = Qwen2Tokenizer(vocab=vocabulary(), merges=[], eos_token="<|im_end|>")
    made.add_special_tokens({"additional_special_tokens": [*SPECIAL[1:], *PADS]})
    made.chat_template = TEMPLATE
    return made


def config() -> dict[str, Any]:
    """Return the settings of a model of two layers, with a vision tower of two."""
    words = vocabulary()
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "initializer_range": DEVIATION}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": WIDTH // 4, "num_hidden_layers": 2}
    rope = {"mrope_section": [4, 2, 2], "rope_type": "default", "rope_theta": 10000.0}
    text = {**sizes, **heads, "vocab_size": len(words), "tie_word_embeddings": True, "rope_parameters": rope}
    vision = {**sizes, "depth": 2, "num_heads": 4, "out_hidden_size": WIDTH, "patch_size": 4}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3_vl",
        "text_config": {**text, "max_position_embeddings": 4096},
        "vision_config": {**vision, "deepstack_visual_indexes": [0], "num_position_embeddings": 64},
        "image_token_id": words["<|image_pad|>"],
        "video_token_id": words["<|video_pad|>"],
        "vision_start_token_id": words["<|vision_start|>"],
        "vision_end_token_id": words["<|vision_end|>"],
    }


def save(folder: Path, seed: int = 0) -> None:
    """Write the model with random weights, its tokenizer, and the settings of its processor of media."""
    torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        cls = getattr(transformers, ARCHITECTURE)
        cls(cls.config_class(**config())).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    for name, values in {**MEDIA, "config.json": config()}.items():
        (folder / name).write_text(json.dumps(values), encoding="utf-8")
