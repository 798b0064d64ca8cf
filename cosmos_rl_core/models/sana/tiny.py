"""A tiny pipeline of the model plugin sana."""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderDC,
    SanaPipeline,
    SanaTransformer2DModel,
)

from cosmos_rl_core.tiny.sana import sana_scheduler, sana_sizes
from cosmos_rl_core.tiny.texts import gemma, gemma_tokenizer


def save(folder: Path, seed: int = 0, **transformer: Any) -> Path:
    """Write a SanaPipeline: 4 latent channels, 8 x 8 compression. ``transformer`` are further settings of that part."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _pipeline(transformer).save_pretrained(folder)
    return folder


def _pipeline(transformer: dict[str, Any]) -> SanaPipeline:
    blocks = ("ResBlock", "ResBlock", "EfficientViTBlock", "EfficientViTBlock")
    return SanaPipeline(
        tokenizer=gemma_tokenizer(),
        text_encoder=gemma(),  # pyright: ignore[reportArgumentType]
        transformer=SanaTransformer2DModel(**sana_sizes(sample_size=16, patch_size=1, **transformer)),
        vae=AutoencoderDC(
            latent_channels=4,
            attention_head_dim=4,
            encoder_block_types=blocks,  # pyright: ignore[reportArgumentType]
            decoder_block_types=blocks,  # pyright: ignore[reportArgumentType]
            encoder_block_out_channels=(8,) * 4,
            decoder_block_out_channels=(8,) * 4,
            encoder_layers_per_block=(1,) * 4,
            decoder_layers_per_block=(1,) * 4,
            encoder_qkv_multiscales=((), (), (5,), (5,)),
            decoder_qkv_multiscales=((), (), (5,), (5,)),
            scaling_factor=0.41407,
        ),
        scheduler=sana_scheduler(3.0),
    )
