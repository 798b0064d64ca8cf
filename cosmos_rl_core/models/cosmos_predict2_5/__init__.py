"""Cosmos-Predict2.5: text, image or video to video; Qwen2.5-VL as text encoder, 5-D latents of Wan's causal video VAE.

The stock pipeline's ``guidance_scale`` g is ``v_c + g (v_c - v_u)``, which is ours less 1, and it has none up to g = 1.
The mask channel marks given frames. The frozen prefix takes 100352 channels to 1024 in the released models.
"""

from cosmos_rl_core.models._spec import ModelSpec

GUARDRAIL_PACKAGE, FROZEN_PREFIX = "cosmos_guardrail", "crossattn_proj"

SPEC = ModelSpec(
    pipeline_classes=("Cosmos2_5_PredictBasePipeline",),
    vae_classes=("AutoencoderKLWan",),
    mask_channels=1,
    guardrail_package=GUARDRAIL_PACKAGE,
    guidance_offset=1,
    max_given_frames=2,
    frozen_prefix=FROZEN_PREFIX,
    stock_multiple=16,
)
