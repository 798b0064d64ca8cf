"""Stable Diffusion 3 and 3.5: text to image, three text encoders, 4-D latents."""

from cosmos_rl_core.models._vaes import KL_VAE
from cosmos_rl_core.pipelines.comfyui import FEED_FORWARD, JOINT_ATTENTION, as_diffusers
from cosmos_rl_core.pipelines.spec import ModelSpec, Settings, linear_shift


def _positions(transformer: Settings) -> tuple[int, int, int]:
    return 1, transformer["pos_embed_max_size"], transformer["pos_embed_max_size"]


SPEC = ModelSpec(
    pipeline_classes=("StableDiffusion3Pipeline",),
    vaes=KL_VAE,
    transformer_class="SD3Transformer2DModel",
    transformer_defaults={
        "patch_size": 2,
        "in_channels": 16,
        "pos_embed_max_size": 96,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 2048,
    },
    positions=_positions,
    text_width=lambda transformer: transformer["joint_attention_dim"],
    pooled_width=lambda transformer: transformer["pooled_projection_dim"],
    clip_tokenizer="tokenizer",
    max_prompt_length=512,
    shift=linear_shift(1.16),
    comfyui=as_diffusers(
        rf"transformer_blocks\.\d+\.attn2?\.{JOINT_ATTENTION}",
        rf"transformer_blocks\.\d+\.ff(_context)?\.{FEED_FORWARD}",
    ),
)
