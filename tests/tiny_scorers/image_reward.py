"""A tiny ImageReward, converted from tensors with the names of the published file, and a tokenizer of its words."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from cosmos_rl_core.rewards._image_reward import weights
from cosmos_rl_core.rewards._image_reward.model import WIDTHS

SIDE, PATCH, VISION, TEXT, LAYERS, WORDS = 32, 8, 32, 24, 2, 40
LETTERS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "sign", "that", "says", "in", "red", "k", "##0", "##1", '"']


def published() -> dict[str, Tensor]:
    """Random tensors of the published file, in small: its names are BLIP's own."""
    torch.manual_seed(0)
    places = (SIDE // PATCH) ** 2 + 1
    found: dict[str, tuple[int, ...]] = {"cls_token": (1, 1, VISION), "pos_embed": (1, places, VISION)}
    found |= {"patch_embed.proj.weight": (VISION, 3, PATCH, PATCH), "patch_embed.proj.bias": (VISION,)}
    found |= norm("norm", VISION)
    for i in range(LAYERS):
        found |= norm(f"blocks.{i}.norm1", VISION) | norm(f"blocks.{i}.norm2", VISION)
        found |= linear(f"blocks.{i}.attn.qkv", VISION, 3 * VISION) | linear(f"blocks.{i}.attn.proj", VISION, VISION)
        found |= linear(f"blocks.{i}.mlp.fc1", VISION, 48) | linear(f"blocks.{i}.mlp.fc2", 48, VISION)
    shapes = {f"blip.visual_encoder.{name}": shape for name, shape in found.items()}
    shapes |= {f"blip.text_encoder.{name}": shape for name, shape in texts().items()}
    widths = [TEXT, *WIDTHS, 1]
    for i, given, made in zip((0, 2, 4, 6, 7), widths, widths[1:], strict=False):
        shapes |= linear(f"mlp.layers.{i}", given, made)
    shapes |= linear("blip.vision_proj", VISION, 8) | linear("blip.text_proj", TEXT, 8)
    made = {name: torch.randn(shape, device="cpu") / shape[-1] ** 0.5 for name, shape in shapes.items()}
    return made | {"blip.text_encoder.embeddings.position_ids": torch.arange(64, device="cpu")[None]}


def texts() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"embeddings.word_embeddings.weight": (WORDS, TEXT)}
    found |= {"embeddings.position_embeddings.weight": (64, TEXT)} | norm("embeddings.LayerNorm", TEXT)
    for i in range(LAYERS):
        start = f"encoder.layer.{i}"
        for kind, width in (("attention", TEXT), ("crossattention", VISION)):
            found |= linear(f"{start}.{kind}.self.query", TEXT, TEXT)
            found |= linear(f"{start}.{kind}.self.key", width, TEXT) | linear(f"{start}.{kind}.self.value", width, TEXT)
            found |= linear(f"{start}.{kind}.output.dense", TEXT, TEXT) | norm(f"{start}.{kind}.output.LayerNorm", TEXT)
        found |= linear(f"{start}.intermediate.dense", TEXT, 48) | linear(f"{start}.output.dense", 48, TEXT)
        found |= norm(f"{start}.output.LayerNorm", TEXT)
    return found


def linear(name: str, given: int, made: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (made, given), f"{name}.bias": (made,)}


def norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def tokenizer() -> transformers.BertTokenizer:
    return transformers.BertTokenizer(vocab={word: i for i, word in enumerate(LETTERS)})


def settings(folder: Path) -> dict[str, Any]:
    weights.convert(published(), folder / "model", "the test's tensors")
    tokenizer().save_pretrained(folder / "words")
    return {"model": str(folder / "model"), "tokenizer": str(folder / "words"), "batch_size": 3}
