"""A tiny pipeline of the model plugin flux2_klein."""

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, Flux2Transformer2DModel
from torch import Tensor
from transformers import Qwen3ForCausalLM

from cosmos_rl_core.tiny.texts import qwen3_config, qwen3_tokenizer


def save(folder: Path, seed: int = 0, *, is_distilled: bool = False) -> Path:
    """Write a Flux2KleinPipeline: latents of 16 channels, 8 pixels wide, whose statistics are not 0 and 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _pipeline(is_distilled).save_pretrained(folder)
    return folder


def arranged(raw: Tensor) -> Tensor:
    """Return latents of the VAE in the order of the pipeline's state."""
    return Flux2KleinPipeline._patchify_latents(raw)


def latents_of(pipeline: Any, made: Tensor) -> Tensor:
    """Return the last state of a stock call, computed from the latents ``made`` that it returned.

    The stock call undoes the normalisation and the squares of its state before it returns latents.
    """
    vae = pipeline.vae
    deviation = torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
    return (arranged(made) - vae.bn.running_mean.view(1, -1, 1, 1)) / deviation.view(1, -1, 1, 1)


def _pipeline(is_distilled: bool) -> Flux2KleinPipeline:
    vae = AutoencoderKLFlux2(
        block_out_channels=(8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=2,
        sample_size=32,
    )
    for statistics, (low, high) in ((vae.bn.running_mean, (-0.5, 0.5)), (vae.bn.running_var, (0.3, 2.0))):
        assert statistics is not None
        torch.nn.init.uniform_(statistics, low, high)
    return Flux2KleinPipeline(
        transformer=Flux2Transformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=48,
            timestep_guidance_channels=16,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=False,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae,
        text_encoder=Qwen3ForCausalLM(qwen3_config(num_hidden_layers=28, initializer_range=0.08)),
        tokenizer=qwen3_tokenizer(),  # pyright: ignore[reportArgumentType]
        is_distilled=is_distilled,
    )
