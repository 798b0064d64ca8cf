"""A Wan video pipeline of a few ten thousand random weights: latents with a time axis, and a multistep scheduler."""

from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

from cosmos_rl_core.tiny._parts import seeded, t5_tokenizer

LATENT_CHANNELS = 16
TEXT_WIDTH = 32


def build_wan(seed: int) -> WanPipeline:
    """The whole pipeline with random weights, float32 on the CPU; a function of ``seed`` alone.

    Generate with ``height=16, width=16, num_frames=5, max_sequence_length=12``: latents ``[1, 16, 2, 2, 2]``.
    """
    tokenizer = t5_tokenizer()
    return WanPipeline(
        transformer=_transformer(seed),
        vae=_vae(seed),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),  # pyright: ignore[reportArgumentType]
        text_encoder=_text_encoder(len(tokenizer), seed),
        tokenizer=tokenizer,  # pyright: ignore[reportArgumentType]
    )


def _transformer(seed: int) -> WanTransformer3DModel:
    with seeded(seed, "wan transformer"):
        return WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            text_dim=TEXT_WIDTH,
            freq_dim=256,
            ffn_dim=32,
            num_layers=2,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=32,
        )


def _vae(seed: int) -> AutoencoderKLWan:
    with seeded(seed, "wan vae"):
        vae = AutoencoderKLWan(
            base_dim=3,
            z_dim=LATENT_CHANNELS,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
        )
    return vae.eval()


def _text_encoder(vocab_size: int, seed: int) -> UMT5EncoderModel:
    config = UMT5Config(vocab_size=vocab_size, d_model=TEXT_WIDTH, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    with seeded(seed, "umt5"):
        encoder = UMT5EncoderModel(config)
    return encoder.eval().requires_grad_(False)
