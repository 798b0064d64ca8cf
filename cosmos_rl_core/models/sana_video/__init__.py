"""SANA-Video: text to video, Gemma's text, 5-D latents of a causal video VAE."""

from cosmos_rl_core.models._vaes import WAN_VAE
from cosmos_rl_core.pipelines.spec import Geometry, ModelSpec, Settings, Vae, rope_positions


def _ltx2(vae: Settings) -> Geometry | None:
    spatial = vae["spatial_compression_ratio"]
    return spatial and Geometry(vae["latent_channels"], spatial, vae["temporal_compression_ratio"])


_LTX2_DEFAULTS = {"latent_channels": 128, "spatial_compression_ratio": None, "temporal_compression_ratio": None}

SPEC = ModelSpec(
    pipeline_classes=("SanaVideoPipeline",),
    vaes=WAN_VAE | {"AutoencoderKLLTX2Video": Vae(_ltx2, _LTX2_DEFAULTS, posterior=True)},
    transformer_class="SanaVideoTransformer3DModel",
    transformer_defaults={
        "patch_size": (1, 2, 2),
        "in_channels": 16,
        "rope_max_seq_len": 1024,
        "caption_channels": 2304,
    },
    refused_settings={"guidance_embeds": "a distilled model, with guidance as an input"},
    positions=rope_positions,
    text_width=lambda transformer: transformer["caption_channels"],
    unread_padding={"prompt_embeds": "prompt_attention_mask"},
    takes_instruction=True,
    stock_multiple=32,
)
