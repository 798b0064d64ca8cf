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

from tests.tiny_pipelines._texts import t5_sizes, t5_tokenizer
from tests.tiny_pipelines._vaes import wan_vae


def save(folder: Path, seed: int = 0) -> Path:
    """Write a WanPipeline: 4 latent channels, 8 x 8 x 4 compression."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _pipeline().save_pretrained(folder)
    return folder


def _pipeline() -> WanPipeline:
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
        vae=wan_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
