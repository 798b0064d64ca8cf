"""Facts that pipelines of Wan share. It imports no torch."""

import re

from cosmos_rl_core.models._vaes import WAN_VAE
from cosmos_rl_core.pipelines.spec import ModelSpec, rope_positions

_ATTENTIONS = {"attn1": "self_attn", "attn2": "cross_attn"}
_LINEAR = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o", "add_k_proj": "k_img", "add_v_proj": "v_img"}
_MODULE = re.compile(
    rf"blocks\.(\d+)\.(?:({'|'.join(_ATTENTIONS)})\.({'|'.join(map(re.escape, _LINEAR))})|ffn\.(net\.0\.proj|net\.2))"
)


def _comfyui(module: str) -> str | None:
    """Return a module's name in Wan's own files, which ComfyUI also uses; None if ComfyUI has no such module."""
    if (found := _MODULE.fullmatch(module)) is None:
        return None
    block, attention, linear, feed_forward = found.groups()
    own = f"ffn.{feed_forward.split('.')[1]}" if feed_forward else f"{_ATTENTIONS[attention]}.{_LINEAR[linear]}"
    return f"diffusion_model.blocks.{block}.{own}"


WAN = ModelSpec(
    pipeline_classes=("WanPipeline",),
    vaes=WAN_VAE,
    transformer_class="WanTransformer3DModel",
    transformer_defaults={"patch_size": (1, 2, 2), "in_channels": 16, "rope_max_seq_len": 1024, "text_dim": 4096},
    refused_settings={
        "boundary_ratio": "a Wan 2.2 A14B, of two transformers, experts for high and for low noise; one transformer is "
        "trained here, so take Wan 2.2 TI2V 5B (Wan-AI/Wan2.2-TI2V-5B-Diffusers) or Wan 2.1, such as "
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers, or Wan-AI/Wan2.1-I2V-14B-480P-Diffusers for pictures"
    },
    positions=rope_positions,
    text_width=lambda transformer: transformer["text_dim"],
    unread_padding={"prompt_embeds": None},
    float32_modules=("rope", "time_embedder", "scale_shift_table", "norm1", "norm2", "norm3"),
    context_parallel=True,
    stock_multiple=16,
    comfyui=_comfyui,
)
"""The facts of ``WanPipeline`` without references."""
