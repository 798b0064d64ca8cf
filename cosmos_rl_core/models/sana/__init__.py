"""SANA and SANA 1.5: text to image, Gemma's text, 4-D latents of a deep-compression autoencoder."""

from cosmos_rl_core.pipelines.spec import Geometry, ModelSpec, Settings, Vae


def _geometry(vae: Settings) -> Geometry:
    return Geometry(vae["latent_channels"], 2 ** (len(vae["encoder_block_out_channels"]) - 1))


SPEC = ModelSpec(
    pipeline_classes=("SanaPipeline",),
    vaes={
        # It encodes to latents themselves, without a posterior.
        "AutoencoderDC": Vae(
            _geometry, {"latent_channels": 32, "encoder_block_out_channels": (128, 256, 512, 512, 1024, 1024)}
        )
    },
    transformer_class="SanaTransformer2DModel",
    transformer_defaults={"patch_size": 1, "in_channels": 32, "timestep_scale": 1.0, "caption_channels": 2304},
    refused_settings={"guidance_embeds": "SANA-Sprint, a distilled model, with guidance as an input"},
    text_width=lambda transformer: transformer["caption_channels"],
    unread_padding={"prompt_embeds": "prompt_attention_mask"},
    takes_instruction=True,
    stock_multiple=32,
)
