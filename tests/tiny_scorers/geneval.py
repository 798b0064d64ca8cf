"""A tiny Mask2Former that is sure of some persons and bicycles, and a tiny CLIP model."""

from pathlib import Path
from typing import Any

import torch
from transformers import Mask2FormerConfig, Mask2FormerImageProcessorPil

from cosmos_rl_core.rewards._geneval.model import Segmenter
from cosmos_rl_core.rewards._geneval.rule import CLASSES
from tests.tiny_scorers import _clip

SIDE = 64


def config(classes: int = len(CLASSES)) -> Mask2FormerConfig:
    swin: dict[str, Any] = {
        "image_size": SIDE,
        "embed_dim": 8,
        "depths": [1, 1, 1, 1],
        "num_heads": [1, 1, 2, 2],
        "window_size": 2,
    }
    sizes: dict[str, Any] = {
        "feature_size": 32,
        "mask_feature_size": 32,
        "hidden_dim": 32,
        "encoder_feedforward_dim": 16,
    }
    sizes |= {"dim_feedforward": 16, "num_attention_heads": 2, "encoder_layers": 1, "decoder_layers": 2}
    names = dict(enumerate(CLASSES[:classes]))
    backbone = {"model_type": "swin", "out_features": ["stage1", "stage2", "stage3", "stage4"], **swin}
    return Mask2FormerConfig(backbone_config=backbone, num_queries=6, id2label=names, **sizes)


def save(folder: Path) -> str:
    torch.manual_seed(0)
    model = Segmenter(config())
    with torch.no_grad():
        # Random weights are sure of nothing: of 81 classes, each has a probability of about 0.01.
        model.class_predictor.weight[2:-1] = 0
        model.class_predictor.bias[2:-1] = -100
        model.class_predictor.weight.mul_(50)
    model.save_pretrained(folder)
    Mask2FormerImageProcessorPil(size={"shortest_edge": SIDE, "longest_edge": 2 * SIDE}).save_pretrained(folder)
    return str(folder)


def settings(folder: Path) -> dict[str, Any]:
    clip = _clip.save(folder / "clip")
    return {"model": clip, "detector": save(folder / "detector"), "batch_size": 3, "detector_batch_size": 2}
