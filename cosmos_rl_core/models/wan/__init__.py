"""Wan 2.1: text to video, one text encoder, 5-D latents of a causal video VAE."""

from cosmos_rl_core.models._spec import ModelSpec

SPEC = ModelSpec(
    pipeline_classes=("WanPipeline",),
    vae_classes=("AutoencoderKLWan",),
    refused_settings={
        "boundary_ratio": "a Wan 2.2 pipeline, of two transformers",
        "expand_timesteps": "a Wan 2.2 pipeline, of timesteps by token",
    },
    stock_multiple=16,
)
