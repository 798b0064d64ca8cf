"""Stock pipelines of toy size with random weights and hand-made tokenizers, for tests."""

import json
import string
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLLTX2Video,
    AutoencoderKLWan,
    Cosmos2_5_PredictBasePipeline,
    CosmosTransformer3DModel,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    SanaPipeline,
    SanaTransformer2DModel,
    SanaVideoPipeline,
    SanaVideoTransformer3DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    GemmaTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

_LETTERS = string.ascii_lowercase + string.digits + ".,"


def save_sd3(folder: Path, seed: int = 0) -> Path:
    """Write a StableDiffusion3Pipeline: latents of 4 channels, 8 pixels wide patches of 2 x 4."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _sd3().save_pretrained(folder)
    return folder


def save_wan(folder: Path, seed: int = 0) -> Path:
    """Write a WanPipeline: 4 latent channels, 8 x 8 x 4 compression."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _wan().save_pretrained(folder)
    return folder


def save_sana(folder: Path, seed: int = 0, **transformer: Any) -> Path:
    """Write a SanaPipeline: 4 latent channels, 8 x 8 compression. ``transformer`` are further settings of it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _sana(transformer).save_pretrained(folder)
    return folder


def save_sana_video(folder: Path, seed: int = 0, **transformer: Any) -> Path:
    """Write a SanaVideoPipeline: 4 latent channels, 8 x 8 x 4 compression. ``transformer`` are further settings."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _sana_video(transformer).save_pretrained(folder)
    return folder


def _sd3() -> StableDiffusion3Pipeline:
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=32,
            caption_projection_dim=16,
            pooled_projection_dim=32,
            pos_embed_max_size=8,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=AutoencoderKL(
            block_out_channels=(8, 8, 8),  # pyright: ignore[reportArgumentType]
            down_block_types=("DownEncoderBlock2D",) * 3,  # pyright: ignore[reportArgumentType]
            up_block_types=("UpDecoderBlock2D",) * 3,  # pyright: ignore[reportArgumentType]
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=2,
            sample_size=32,
            use_quant_conv=False,
            use_post_quant_conv=False,
            scaling_factor=1.5305,
            shift_factor=0.0609,
        ),
        text_encoder=_clip(),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=_clip(),
        tokenizer_2=_clip_tokenizer(),
        text_encoder_3=T5EncoderModel(T5Config(**_t5_sizes())),
        tokenizer_3=_t5_tokenizer(),
    )


def _wan() -> WanPipeline:
    return WanPipeline(
        tokenizer=_t5_tokenizer(),  # pyright: ignore[reportArgumentType]
        text_encoder=UMT5EncoderModel(UMT5Config(**_t5_sizes())),
        transformer=WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=32,
            freq_dim=16,
            ffn_dim=32,
            num_layers=2,
            rope_max_seq_len=32,
        ),
        vae=_wan_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


def _wan_vae(channels: int = 4) -> AutoencoderKLWan:
    return AutoencoderKLWan(
        base_dim=4,
        z_dim=channels,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[0.1, -0.2, 0.3, 0.0] * (channels // 4),
        latents_std=[1.5, 0.7, 2.0, 1.0] * (channels // 4),
    )


def save_ltx2_vae(folder: Path) -> None:
    """Write LTX2's VAE in the place of the one that the SANA-Video pipeline in ``folder`` has: 8 x 8 x 2 compression.

    Its statistics are among its weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = AutoencoderKLLTX2Video(
            latent_channels=4,
            block_out_channels=(8,),
            down_block_types=("LTX2VideoDownBlock3D",),
            decoder_block_out_channels=(16,),  # pyright: ignore[reportArgumentType]
            layers_per_block=(1, 1),  # pyright: ignore[reportArgumentType]
            decoder_layers_per_block=(1, 1),  # pyright: ignore[reportArgumentType]
            spatio_temporal_scaling=(True,),
            decoder_spatio_temporal_scaling=(True,),
            downsample_type=("spatiotemporal",),  # pyright: ignore[reportArgumentType]
            upsample_type=("spatiotemporal",),  # pyright: ignore[reportArgumentType]
            upsample_residual=(True,),
            upsample_factor=(2,),  # pyright: ignore[reportArgumentType]
            spatial_compression_ratio=8,
            temporal_compression_ratio=2,
        )
        vae.get_buffer("latents_mean").copy_(torch.tensor([0.1, -0.2, 0.3, 0.0]))
        vae.get_buffer("latents_std").copy_(torch.tensor([1.5, 0.7, 2.0, 1.0]))
    vae.save_pretrained(folder / "vae")
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    index["vae"] = ["diffusers", "AutoencoderKLLTX2Video"]
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")


def _sana(transformer: dict[str, Any]) -> SanaPipeline:
    blocks = ("ResBlock", "ResBlock", "EfficientViTBlock", "EfficientViTBlock")
    return SanaPipeline(
        tokenizer=_gemma_tokenizer(),
        text_encoder=_gemma(),  # pyright: ignore[reportArgumentType]
        transformer=SanaTransformer2DModel(**_sana_sizes(sample_size=16, patch_size=1, **transformer)),
        vae=AutoencoderDC(
            latent_channels=4,
            attention_head_dim=4,
            encoder_block_types=blocks,  # pyright: ignore[reportArgumentType]
            decoder_block_types=blocks,  # pyright: ignore[reportArgumentType]
            encoder_block_out_channels=(8,) * 4,
            decoder_block_out_channels=(8,) * 4,
            encoder_layers_per_block=(1,) * 4,
            decoder_layers_per_block=(1,) * 4,
            encoder_qkv_multiscales=((), (), (5,), (5,)),
            decoder_qkv_multiscales=((), (), (5,), (5,)),
            scaling_factor=0.41407,
        ),
        scheduler=_sana_scheduler(3.0),
    )


def _sana_video(transformer: dict[str, Any]) -> SanaVideoPipeline:
    return SanaVideoPipeline(
        tokenizer=_gemma_tokenizer(),
        text_encoder=_gemma(),  # pyright: ignore[reportArgumentType]
        transformer=SanaVideoTransformer3DModel(
            **_sana_sizes(sample_size=30, patch_size=(1, 2, 2), rope_max_seq_len=32, **transformer)
        ),
        vae=_wan_vae(),
        scheduler=_sana_scheduler(8.0),
    )


def _sana_sizes(**given: Any) -> dict[str, Any]:
    return {
        "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 12,
        "num_cross_attention_heads": 2, "cross_attention_head_dim": 12, "cross_attention_dim": 24,
        "caption_channels": 16, "qk_norm": "rms_norm_across_heads", **given,
    }  # fmt: skip


def _sana_scheduler(shift: float) -> DPMSolverMultistepScheduler:
    return DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)


def _gemma() -> Gemma2Model:
    return Gemma2Model(
        Gemma2Config(
            vocab_size=len(_gemma_vocabulary()),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            query_pre_attn_scalar=8,
        )
    )


def _gemma_vocabulary() -> dict[str, int]:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "\N{LOWER ONE EIGHTH BLOCK}", *_LETTERS]
    return {token: i for i, token in enumerate(tokens)}


def _gemma_tokenizer() -> GemmaTokenizer:
    return GemmaTokenizer(vocab=_gemma_vocabulary(), merges=[], add_bos_token=True)


def _clip() -> CLIPTextModelWithProjection:
    vocabulary = _clip_vocabulary()
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(vocabulary),
            hidden_size=16,
            intermediate_size=16,
            projection_dim=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            bos_token_id=vocabulary["<|startoftext|>"],
            eos_token_id=vocabulary["<|endoftext|>"],
            pad_token_id=vocabulary["<|endoftext|>"],
        )
    )


def _clip_vocabulary() -> dict[str, int]:
    tokens = [*_LETTERS, *(f"{letter}</w>" for letter in _LETTERS), "<|startoftext|>", "<|endoftext|>"]
    return {token: i for i, token in enumerate(tokens)}


def _clip_tokenizer() -> CLIPTokenizer:
    return CLIPTokenizer(vocab=_clip_vocabulary(), merges=[], model_max_length=77)


def _t5_sizes() -> dict[str, Any]:
    return {
        "vocab_size": len(_LETTERS) + 4, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2,
        "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
    }  # fmt: skip


def _t5_tokenizer() -> T5Tokenizer:
    pieces = ["<pad>", "</s>", "<unk>", "\N{LOWER ONE EIGHTH BLOCK}", *_LETTERS]
    return T5Tokenizer(vocab=[(piece, -1.0) for piece in pieces], extra_ids=0)


def save_cosmos_predict2_5(
    folder: Path, seed: int = 0, *, concat_padding_mask: bool = False, latent_channels: int = 4
) -> Path:
    """Write a Cosmos2_5_PredictBasePipeline: 8 x 8 x 4 compression, a projection of the text.

    Its index names no safety checker. ``concat_padding_mask`` is what real ones have, and needs torchvision to run;
    real ones have 16 ``latent_channels``.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _cosmos_predict2_5(concat_padding_mask, latent_channels).save_pretrained(folder)
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    del index["safety_checker"]
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


class LetsPass:
    """Stands where a safety checker would: the stock pipeline is neither made nor run without one."""

    def to(self, *_: Any) -> None:
        """Has no weights."""

    def check_text_safety(self, _: str) -> bool:
        """Lets every prompt pass."""
        return True


def _cosmos_predict2_5(concat_padding_mask: bool, latent_channels: int) -> Cosmos2_5_PredictBasePipeline:
    text_encoder, tokenizer = _qwen()
    return Cosmos2_5_PredictBasePipeline(
        text_encoder=text_encoder,
        tokenizer=tokenizer,  # pyright: ignore[reportArgumentType]
        transformer=CosmosTransformer3DModel(
            in_channels=latent_channels + 1,
            out_channels=latent_channels,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            text_embed_dim=16,
            adaln_lora_dim=8,
            max_size=(8, 8, 8),
            rope_scale=(1.0, 3.0, 3.0),
            concat_padding_mask=concat_padding_mask,
            extra_pos_embed_type=None,
            use_crossattn_projection=True,
            crossattn_proj_in_channels=2 * 16,
            encoder_hidden_states_channels=16,
        ),
        vae=_wan_vae(latent_channels),
        scheduler=UniPCMultistepScheduler(
            use_karras_sigmas=True,
            use_flow_sigmas=True,
            prediction_type="flow_prediction",
            sigma_max=200.0,  # pyright: ignore[reportArgumentType]
            sigma_min=0.01,  # pyright: ignore[reportArgumentType]
        ),
        safety_checker=LetsPass(),  # pyright: ignore[reportArgumentType]
    )


def _qwen() -> tuple[Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer]:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>"]
    tokens = [*sorted(ByteLevel.alphabet()), *special]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    encoder = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                **sizes,
                "vocab_size": len(tokens),
                "num_hidden_layers": 2,
                "num_key_value_heads": 1,
                "rope_parameters": {"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 10000.0},
                "bos_token_id": vocabulary["<|endoftext|>"],
                "eos_token_id": vocabulary["<|im_end|>"],
            },
            vision_config={**sizes, "depth": 1, "num_heads": 2, "out_hidden_size": 16},
            image_token_id=vocabulary["<|image_pad|>"],
            video_token_id=vocabulary["<|video_pad|>"],
            vision_start_token_id=vocabulary["<|vision_start|>"],
            vision_end_token_id=vocabulary["<|endoftext|>"],
        )
    )
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:]})
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}<|im_end|>\n{% endfor %}"
    )
    return encoder, tokenizer
