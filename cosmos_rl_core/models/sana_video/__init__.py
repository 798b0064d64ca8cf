"""SANA-Video: text to video, Gemma's text, 5-D latents of a causal video VAE."""

from cosmos_rl_core.models._spec import ModelSpec

SPEC = ModelSpec(
    pipeline_classes=("SanaVideoPipeline",),
    vae_classes=("AutoencoderKLWan", "AutoencoderKLLTX2Video"),
    refused_settings={"guidance_embeds": "a distilled model, which is told the guidance"},
    takes_instruction=True,
    stock_multiple=32,
)
