"""A tiny DINOv2 model."""

from pathlib import Path
from typing import Any

import torch
from transformers import BitImageProcessorPil, Dinov2Config, Dinov2Model

SCALED, SIDE = 32, 28
"""Shorter side to which pictures are scaled, and side of the centre that is cut out."""


def settings(folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    sizes |= {"image_size": 70, "patch_size": 7}
    model = Dinov2Model(Dinov2Config(**sizes))
    # At the default scale of weights a tiny model sees all pictures alike.
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim > 1:
                weights.mul_(10)
    model.save_pretrained(folder)
    square = {"height": SIDE, "width": SIDE}
    images = BitImageProcessorPil(size={"shortest_edge": SCALED}, crop_size=square, do_resize=True, do_center_crop=True)
    images.save_pretrained(folder)
    return {"model": str(folder), "batch_size": 3}
