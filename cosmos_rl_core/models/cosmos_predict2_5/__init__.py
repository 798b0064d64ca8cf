"""Cosmos-Predict2.5: text, image or video to video; Qwen2.5-VL as text encoder, 5-D latents of Wan's causal video VAE.

The stock pipeline computes ``v_c + g (v_c - v_u)`` for its ``guidance_scale`` g, which is ours minus 1, and guides only
if g is above 1. The mask channel marks given frames. In the released models the frozen prefix maps 100352 channels to
1024.
"""

from cosmos_rl_core.pipelines.spec import (
    CONDITIONAL_LATENTS,
    CONDITIONAL_MASK,
    Geometry,
    ModelSpec,
    References,
    Settings,
    Vae,
    patch_size,
)

GUARDRAIL_PACKAGE, FROZEN_PREFIX = "cosmos_guardrail", "crossattn_proj"


def _geometry(vae: Settings) -> Geometry:
    # The stock pipeline counts the halvings instead of reading the scale factors.
    halved = vae["temperal_downsample"]
    return Geometry(vae["z_dim"], 2 ** len(halved), 2 ** sum(halved))


def _positions(transformer: Settings) -> tuple[int, int, int]:
    patch = patch_size(transformer)
    frames, height, width = (most // side for most, side in zip(transformer["max_size"], patch, strict=True))
    if transformer["extra_pos_embed_type"]:
        return frames, height, width
    # One row of rotary positions, as long as the longest side, serves all three axes.
    most = max(frames, height, width)
    return most, most, most


def _text_width(transformer: Settings) -> int:
    projected = transformer["use_crossattn_projection"]
    return transformer["crossattn_proj_in_channels" if projected else "text_embed_dim"]


SPEC = ModelSpec(
    pipeline_classes=("Cosmos2_5_PredictBasePipeline",),
    vaes={
        "AutoencoderKLWan": Vae(_geometry, {"z_dim": 16, "temperal_downsample": (False, True, True)}, posterior=True)
    },
    transformer_class="CosmosTransformer3DModel",
    transformer_defaults={
        "patch_size": (1, 2, 2),
        "in_channels": 16,
        "max_size": (128, 240, 240),
        "extra_pos_embed_type": "learnable",
        "concat_padding_mask": True,
        "text_embed_dim": 1024,
        "use_crossattn_projection": False,
        "crossattn_proj_in_channels": 1024,
    },
    positions=_positions,
    mask_channels=1,
    text_width=_text_width,
    float32_modules=("learnable_pos_embed",),
    context_parallel=True,
    guardrail_package=GUARDRAIL_PACKAGE,
    guidance_offset=1,
    max_given_frames=2,
    frozen_prefix=FROZEN_PREFIX,
    stock_multiple=16,
    # The argument `image` needs torchvision.
    references=References(
        pipeline_class="Cosmos2_5_PredictBasePipeline",
        argument="video",
        with_argument=lambda frames: {"num_latent_conditional_frames": 1 + (frames - 1) // 4},
        clips=True,
        entries=lambda _, latents: {CONDITIONAL_LATENTS: latents, CONDITIONAL_MASK: (1, latents[1], 1, 1)},
    ),
)
