"""A tiny pipeline of the model plugin wan."""

from pathlib import Path

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import (
    UMT5Config,
    UMT5EncoderModel,
)

from cosmos_rl_core.tiny.autoencoders import wan_vae
from cosmos_rl_core.tiny.texts import t5_sizes, t5_tokenizer

WITH_REFERENCES = {"expand_timesteps": True}
"""Arguments of :func:`save` for a pipeline that takes a picture."""


def save(folder: Path, seed: int = 0, *, expand_timesteps: bool = False) -> Path:
    """Write a WanPipeline: 4 latent channels, 8 x 8 x 4 compression.

    With ``expand_timesteps`` it is a Wan 2.2, whose VAE first cuts pixels into patches: 16 x 16 x 4 compression.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _pipeline(expand_timesteps).save_pretrained(folder)
    return folder


def _pipeline(expand_timesteps: bool) -> WanPipeline:
    return WanPipeline(
        tokenizer=t5_tokenizer(),  # pyright: ignore[reportArgumentType]
        text_encoder=UMT5EncoderModel(UMT5Config(**t5_sizes())),
        transformer=WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=32,
            freq_dim=16,
            ffn_dim=32,
            num_layers=2,
            rope_max_seq_len=32,
        ),
        vae=wan_vae(patched=expand_timesteps),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        expand_timesteps=expand_timesteps,
    )
