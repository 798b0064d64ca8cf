"""A tiny pipeline of the model plugin wan_i2v."""

from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanImageToVideoPipeline, WanTransformer3DModel
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

from cosmos_rl_core.tiny.autoencoders import wan_vae
from cosmos_rl_core.tiny.texts import t5_sizes, t5_tokenizer


def save(folder: Path, seed: int = 0) -> Path:
    """Write a WanImageToVideoPipeline: 16 latent channels, 8 x 8 x 4 compression, 257 embeddings of a picture."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _pipeline().save_pretrained(folder)
    return folder


def _pipeline() -> WanImageToVideoPipeline:
    # The VAE is made first: with other random weights, one so small decodes tens of pixel levels off in bfloat16.
    vae, side = wan_vae(16), 32
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
    }
    return WanImageToVideoPipeline(
        tokenizer=t5_tokenizer(),  # pyright: ignore[reportArgumentType]
        text_encoder=UMT5EncoderModel(UMT5Config(**t5_sizes())),
        image_encoder=CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=side, patch_size=side // 16)),
        image_processor=CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side}),
        transformer=WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=36,
            out_channels=16,
            text_dim=32,
            freq_dim=16,
            ffn_dim=32,
            num_layers=2,
            rope_max_seq_len=32,
            image_dim=16,
            added_kv_proj_dim=24,
        ),
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
