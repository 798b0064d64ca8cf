"""A tiny pipeline of the model plugin sd3."""

from pathlib import Path

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    T5Config,
    T5EncoderModel,
)

from cosmos_rl_core.tiny.autoencoders import kl_vae
from cosmos_rl_core.tiny.texts import clip, clip_tokenizer, t5_sizes, t5_tokenizer


def save(folder: Path, seed: int = 0) -> Path:
    """Write a StableDiffusion3Pipeline: latents of 4 channels, 4 pixels wide, in patches of 2 x 2 latents."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _pipeline().save_pretrained(folder)
    return folder


def _pipeline() -> StableDiffusion3Pipeline:
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=32,
            caption_projection_dim=16,
            pooled_projection_dim=32,
            pos_embed_max_size=8,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=kl_vae(),
        text_encoder=clip(),
        tokenizer=clip_tokenizer(),
        text_encoder_2=clip(),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=T5EncoderModel(T5Config(**t5_sizes())),
        tokenizer_3=t5_tokenizer(),
    )
