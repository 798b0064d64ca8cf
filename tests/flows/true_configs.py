"""Settings of published models: transformer and VAE of each, without weights."""

from typing import Any

_WAN: dict[str, Any] = {
    "_class_name": "WanTransformer3DModel", "patch_size": [1, 2, 2], "attention_head_dim": 128, "text_dim": 4096,
    "freq_dim": 256, "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "eps": 1e-6,
}  # fmt: skip
_VAE: dict[str, Any] = {
    "base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": [],
    "temperal_downsample": [False, True, True], "latents_mean": [0.0] * 16, "latents_std": [1.0] * 16,
}  # fmt: skip
WAN_1_3B = _WAN | {
    "num_attention_heads": 12, "in_channels": 16, "out_channels": 16, "ffn_dim": 8960, "num_layers": 30,
}  # fmt: skip
WAN_5B = _WAN | {
    "num_attention_heads": 24, "in_channels": 48, "out_channels": 48, "ffn_dim": 14336, "num_layers": 30,
    "rope_max_seq_len": 1024,
}  # fmt: skip
WAN_I2V_14B = _WAN | {
    "num_attention_heads": 40, "in_channels": 36, "out_channels": 16, "ffn_dim": 13824, "num_layers": 40,
    "image_dim": 1280, "added_kv_proj_dim": 5120, "rope_max_seq_len": 1024,
}  # fmt: skip
KLEIN_4B: dict[str, Any] = {
    "_class_name": "Flux2Transformer2DModel", "attention_head_dim": 128, "axes_dims_rope": [32, 32, 32, 32],
    "guidance_embeds": False, "in_channels": 128, "joint_attention_dim": 7680, "mlp_ratio": 3.0, "patch_size": 1,
    "num_attention_heads": 24, "num_layers": 5, "num_single_layers": 20, "rope_theta": 2000,
    "timestep_guidance_channels": 256, "eps": 1e-6,
}  # fmt: skip
QWEN_IMAGE_EDIT: dict[str, Any] = {
    "_class_name": "QwenImageTransformer2DModel", "attention_head_dim": 128, "axes_dims_rope": [16, 56, 56],
    "guidance_embeds": False, "in_channels": 64, "joint_attention_dim": 3584, "num_attention_heads": 24,
    "num_layers": 60, "out_channels": 16, "patch_size": 2, "zero_cond_t": True,
}  # fmt: skip
WAN_VAE = _VAE | {"_class_name": "AutoencoderKLWan"}
QWEN_VAE = _VAE | {"_class_name": "AutoencoderKLQwenImage"}
WAN_5B_VAE = WAN_VAE | {
    "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48,
    "in_channels": 12, "out_channels": 12, "is_residual": True, "patch_size": 2, "scale_factor_spatial": 16,
    "scale_factor_temporal": 4,
}  # fmt: skip
KLEIN_VAE: dict[str, Any] = {
    "_class_name": "AutoencoderKLFlux2", "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2,
    "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4, "latent_channels": 32,
    "norm_num_groups": 32, "sample_size": 1024,
}  # fmt: skip
