"""Facts that pipelines of Qwen-Image share. It imports no torch."""

from cosmos_rl_core.pipelines.comfyui import FEED_FORWARD, JOINT_ATTENTION, as_diffusers
from cosmos_rl_core.pipelines.spec import Geometry, ModelSpec, Settings, Vae, falling_sigmas, linear_shift


def _geometry(vae: Settings) -> Geometry:
    # A video VAE; the pipeline encodes one frame.
    return Geometry(vae["z_dim"], 2 ** len(vae["temperal_downsample"]))


QWEN_IMAGE = ModelSpec(
    pipeline_classes=("QwenImagePipeline",),
    vaes={
        "AutoencoderKLQwenImage": Vae(
            _geometry, {"z_dim": 16, "temperal_downsample": (False, True, True)}, posterior=True
        )
    },
    transformer_class="QwenImageTransformer2DModel",
    transformer_defaults={"in_channels": 64, "joint_attention_dim": 3584},
    refused_settings={
        "guidance_embeds": "a distilled model, with guidance as an input",
        "zero_cond_t": "an editing model, with images as an input",
        "use_additional_t_cond": "a layered model",
        "use_layer3d_rope": "a layered model",
    },
    # The transformer's patch_size is the side of the square that the pipeline packs.
    patch=lambda _: (1, 1, 1),
    packing=2,
    text_width=lambda transformer: transformer["joint_attention_dim"],
    max_prompt_length=1024,
    guidance_argument="true_cfg_scale",
    shift=linear_shift(1.15),
    always_shifts=True,
    stock_sigmas=falling_sigmas,
    comfyui=as_diffusers(
        rf"transformer_blocks\.\d+\.attn\.{JOINT_ATTENTION}",
        rf"transformer_blocks\.\d+\.(img|txt)_mlp\.{FEED_FORWARD}",
    ),
)
"""The facts of ``QwenImagePipeline``."""
