"""A tiny pipeline of the model plugin sana_video."""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLLTX2Video,
    SanaVideoPipeline,
    SanaVideoTransformer3DModel,
)

from cosmos_rl_core.tiny.autoencoders import wan_vae
from cosmos_rl_core.tiny.sana import sana_scheduler, sana_sizes
from cosmos_rl_core.tiny.texts import (
    gemma,
    gemma_tokenizer,
)


def save(folder: Path, seed: int = 0, *, latent_channels: int = 4, **transformer: Any) -> Path:
    """Write a SanaVideoPipeline: 8 x 8 x 4 compression; real ones have 16 ``latent_channels``.

    ``transformer`` are further settings of the transformer.
    """
    channels = {"in_channels": latent_channels, "out_channels": latent_channels}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _pipeline(latent_channels, channels | transformer).save_pretrained(folder)
    return folder


def save_ltx2_vae(folder: Path) -> None:
    """Replace the VAE of the SANA-Video pipeline in ``folder`` by LTX2's, of 8 x 8 x 2 compression.

    Its ``latents_mean`` and ``latents_std`` are buffers, saved with its weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = AutoencoderKLLTX2Video(
            latent_channels=4,
            block_out_channels=(8,),
            down_block_types=("LTX2VideoDownBlock3D",),
            decoder_block_out_channels=(16,),  # pyright: ignore[reportArgumentType]
            layers_per_block=(1, 1),  # pyright: ignore[reportArgumentType]
            decoder_layers_per_block=(1, 1),  # pyright: ignore[reportArgumentType]
            spatio_temporal_scaling=(True,),
            decoder_spatio_temporal_scaling=(True,),
            downsample_type=("spatiotemporal",),  # pyright: ignore[reportArgumentType]
            upsample_type=("spatiotemporal",),  # pyright: ignore[reportArgumentType]
            upsample_residual=(True,),
            upsample_factor=(2,),  # pyright: ignore[reportArgumentType]
            spatial_compression_ratio=8,
            temporal_compression_ratio=2,
        )
        vae.get_buffer("latents_mean").copy_(torch.tensor([0.1, -0.2, 0.3, 0.0], device="cpu"))
        vae.get_buffer("latents_std").copy_(torch.tensor([1.5, 0.7, 2.0, 1.0], device="cpu"))
    vae.save_pretrained(folder / "vae")
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    index["vae"] = ["diffusers", "AutoencoderKLLTX2Video"]
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")


def _pipeline(latent_channels: int, transformer: dict[str, Any]) -> SanaVideoPipeline:
    return SanaVideoPipeline(
        tokenizer=gemma_tokenizer(),
        text_encoder=gemma(),  # pyright: ignore[reportArgumentType]
        transformer=SanaVideoTransformer3DModel(
            **sana_sizes(sample_size=30, patch_size=(1, 2, 2), rope_max_seq_len=32, **transformer)
        ),
        vae=wan_vae(latent_channels),
        scheduler=sana_scheduler(8.0),
    )
