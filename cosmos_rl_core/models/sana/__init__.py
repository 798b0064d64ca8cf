"""SANA and SANA 1.5: text to image, Gemma's text, 4-D latents of a deep-compression autoencoder."""

from cosmos_rl_core.models._spec import ModelSpec

SPEC = ModelSpec(
    pipeline_classes=("SanaPipeline",),
    vae_classes=("AutoencoderDC",),
    refused_settings={"guidance_embeds": "SANA-Sprint, a distilled model, which is told the guidance"},
    takes_instruction=True,
    stock_multiple=32,
)
