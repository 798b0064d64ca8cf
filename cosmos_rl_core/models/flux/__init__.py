"""FLUX.1 dev and schnell: text to image, CLIP and T5, 4-D latents in tokens of 2 x 2."""

import numpy as np

from cosmos_rl_core.models._vaes import KL_VAE
from cosmos_rl_core.pipelines.comfyui import FEED_FORWARD, JOINT_ATTENTION, as_diffusers
from cosmos_rl_core.pipelines.spec import ModelSpec, Settings, falling_sigmas, linear_shift


def _sigmas(num_steps: int, scheduler: Settings) -> np.ndarray | None:
    return None if scheduler.get("use_flow_sigmas") else falling_sigmas(num_steps, scheduler)


SPEC = ModelSpec(
    pipeline_classes=("FluxPipeline",),
    vaes=KL_VAE,
    transformer_class="FluxTransformer2DModel",
    transformer_defaults={
        "patch_size": 1,
        "in_channels": 64,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": False,
    },
    packing=2,
    text_width=lambda transformer: transformer["joint_attention_dim"],
    pooled_width=lambda transformer: transformer["pooled_projection_dim"],
    max_prompt_length=512,
    guidance_argument="true_cfg_scale",
    embedded_guidance_scale=3.5,
    # As the commands in diffusers' pages for training FLUX.1 dev set it.
    supervised_guidance_scale=1.0,
    shift=linear_shift(1.15),
    always_shifts=True,
    stock_sigmas=_sigmas,
    comfyui=as_diffusers(
        rf"transformer_blocks\.\d+\.attn\.{JOINT_ATTENTION}",
        rf"transformer_blocks\.\d+\.ff(_context)?\.{FEED_FORWARD}",
        r"single_transformer_blocks\.\d+\.(attn\.to_[qkv]|proj_mlp|proj_out)",
    ),
)
