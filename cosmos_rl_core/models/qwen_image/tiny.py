"""A tiny pipeline of the model plugin qwen_image."""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)

from cosmos_rl_core.tiny.texts import qwen


def save(folder: Path, seed: int = 0) -> Path:
    """Write a QwenImagePipeline: latents of 4 channels, 8 pixels wide."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _pipeline().save_pretrained(folder)
    return folder


def _pipeline() -> QwenImagePipeline:
    text_encoder, tokenizer = qwen()
    return QwenImagePipeline(
        transformer=QwenImageTransformer2DModel(
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            axes_dims_rope=(4, 6, 6),
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
        ),
        vae=AutoencoderKLQwenImage(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            latents_mean=[0.1, -0.2, 0.3, 0.0],
            latents_std=[1.5, 0.7, 2.0, 1.0],
        ),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
    )
