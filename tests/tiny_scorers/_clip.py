"""A CLIP model of toy size, with its tokenizer and its settings of images."""

from pathlib import Path
from typing import Any

import torch
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

from cosmos_rl_core.tiny.texts import clip_config, clip_tokenizer

SIDE = 32


def save(folder: Path, **sizes: Any) -> str:
    """Write a model with random weights and what makes its inputs. ``sizes`` are both of its transformers'."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2} | sizes
    text = {**clip_config().to_dict(), **sizes, "max_position_embeddings": 77, "projection_dim": 16}
    vision = {**sizes, "image_size": SIDE, "patch_size": 8, "projection_dim": 16}
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    # At the default scale of weights a tiny model sees all pictures alike.
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim > 1:
                weights.mul_(10)
    model.save_pretrained(folder)
    clip_tokenizer().save_pretrained(folder)
    images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    images.save_pretrained(folder)
    return str(folder)
