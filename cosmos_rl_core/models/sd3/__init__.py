"""Stable Diffusion 3 and 3.5: text to image, three text encoders, 4-D latents."""

from cosmos_rl_core.models._spec import ModelSpec

SPEC = ModelSpec(
    pipeline_classes=("StableDiffusion3Pipeline",),
    vae_classes=("AutoencoderKL",),
    shifts_by_size=True,
)
