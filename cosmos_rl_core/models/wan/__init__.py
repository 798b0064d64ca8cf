"""Wan 2.1: text to video, one text encoder, 5-D latents of a causal video VAE."""

from cosmos_rl_core.models._vaes import WAN_VAE
from cosmos_rl_core.pipelines.spec import ModelSpec, rope_positions

SPEC = ModelSpec(
    pipeline_classes=("WanPipeline",),
    vaes=WAN_VAE,
    transformer_class="WanTransformer3DModel",
    transformer_defaults={"patch_size": (1, 2, 2), "in_channels": 16, "rope_max_seq_len": 1024, "text_dim": 4096},
    refused_settings={
        "boundary_ratio": "a Wan 2.2 pipeline, of two transformers",
        "expand_timesteps": "a Wan 2.2 pipeline, of timesteps by token",
    },
    positions=rope_positions,
    text_width=lambda transformer: transformer["text_dim"],
    unread_padding={"prompt_embeds": None},
    float32_modules=("rope", "time_embedder", "scale_shift_table", "norm1", "norm2", "norm3"),
    context_parallel=True,
    stock_multiple=16,
)
