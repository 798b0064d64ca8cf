"""Z-Image and Z-Image-Turbo: text to image, Qwen3's text of any length, 4-D latents.

The stock pipeline computes ``v_c + g (v_c - v_u)`` for its ``guidance_scale`` g, which is ours minus 1, and guides
above 0.
"""

from cosmos_rl_core.models._vaes import KL_VAE
from cosmos_rl_core.pipelines.comfyui import as_diffusers
from cosmos_rl_core.pipelines.spec import ModelSpec, Settings, falling_sigmas, linear_shift

TEXT_MULTIPLE = 32
"""Number of tokens; the transformer pads every text to a multiple of it."""


def _positions(transformer: Settings) -> tuple[int, int, int]:
    return 1, *transformer["axes_lens"][1:]


def _text_positions(transformer: Settings) -> int:
    # Two positions are not for text: the first one, and the image's, which follows the padded text.
    return (transformer["axes_lens"][0] - 2) // TEXT_MULTIPLE * TEXT_MULTIPLE


SPEC = ModelSpec(
    pipeline_classes=("ZImagePipeline",),
    vaes=KL_VAE,
    transformer_class="ZImageTransformer2DModel",
    transformer_defaults={"in_channels": 16, "cap_feat_dim": 2560, "axes_lens": (1024, 512, 512)},
    refused_settings={"siglip_feat_dim": "an Omni model, with pictures as an input"},
    # A transformer may have other patches, but the stock pipeline takes only this one.
    patch=lambda _: (1, 2, 2),
    positions=_positions,
    text_positions=_text_positions,
    text_width=lambda transformer: transformer["cap_feat_dim"],
    joined_inputs=("cap_embedder.1",),
    time_argument="t",
    text_argument="cap_feats",
    guidance_offset=1,
    guidance_off=0,
    guidance_options=("cfg_normalization", "cfg_truncation"),
    shift=linear_shift(1.15),
    always_shifts=True,
    stock_sigmas=lambda num_steps, scheduler: falling_sigmas(num_steps, scheduler).tolist(),
    comfyui=as_diffusers(
        r"(layers|noise_refiner|context_refiner)\.\d+\.(attention\.(to_[qkv]|to_out\.0)|feed_forward\.w[123])"
    ),
)
