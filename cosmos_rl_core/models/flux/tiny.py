"""A tiny pipeline of the model plugin flux."""

from pathlib import Path

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from transformers import (
    CLIPTextModel,
    T5Config,
    T5EncoderModel,
)

from cosmos_rl_core.tiny.autoencoders import kl_vae
from cosmos_rl_core.tiny.texts import clip_config, clip_tokenizer, t5_sizes, t5_tokenizer


def save(folder: Path, seed: int = 0, *, guidance_embeds: bool = True) -> Path:
    """Write a FluxPipeline: latents of 4 channels, 4 pixels wide.

    Without ``guidance_embeds`` it is a schnell, which does not shift by size either.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _pipeline(guidance_embeds).save_pretrained(folder)
    return folder


def _pipeline(guidance_embeds: bool) -> FluxPipeline:
    return FluxPipeline(
        transformer=FluxTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=16,
            guidance_embeds=guidance_embeds,
            axes_dims_rope=(4, 6, 6),
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=guidance_embeds, base_shift=0.5, max_shift=1.15, max_image_seq_len=4096
        ),
        vae=kl_vae(),
        text_encoder=CLIPTextModel(clip_config()),
        tokenizer=clip_tokenizer(),
        text_encoder_2=T5EncoderModel(T5Config(**t5_sizes())),
        tokenizer_2=t5_tokenizer(),  # pyright: ignore[reportArgumentType]
    )
