"""A tiny pipeline of the model plugin z_image."""

from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import Qwen3Model

from cosmos_rl_core.tiny.autoencoders import kl_vae
from cosmos_rl_core.tiny.texts import qwen3_config, qwen3_tokenizer


def save(folder: Path, seed: int = 0) -> Path:
    """Write a ZImagePipeline: latents of 4 channels, 4 pixels wide. Its padding tokens are not zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _pipeline().save_pretrained(folder)
    return folder


def _pipeline() -> ZImagePipeline:
    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=8,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[4, 6, 6],
        axes_lens=[1024, 64, 64],
    )
    for token in (transformer.x_pad_token, transformer.cap_pad_token):
        torch.nn.init.normal_(token)
    return ZImagePipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=kl_vae(),
        text_encoder=Qwen3Model(qwen3_config(num_hidden_layers=3)),
        tokenizer=qwen3_tokenizer(),  # pyright: ignore[reportArgumentType]
    )
